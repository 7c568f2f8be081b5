"""The TensorRT adapters, compiled against real headers without warnings and called by a stand-in for TensorRT.

Set STILL_TENSORRT_INCLUDE to the include folders of NVIDIA/TensorRT's release branches, separated by colons; skipped without.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from still_export.targets.trt.plugins import INCLUDE_VARIABLE, pack_archive
from still_graphs.ops import OPS, OpSpec
from still_graphs.spec import CACHE, in_numbers
from still_kernels.attention.spec import ATTENTION
from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.greedy_token.spec import GREEDY_TOKEN
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION
from still_kernels.linear_attention.spec import LINEAR_ATTENTION
from still_kernels.low_rank_matmul.spec import LOW_RANK_MATMUL
from still_kernels.matmul_nbits.spec import MATMUL_NBITS
from still_kernels.registry import kernels_of
from still_kernels.rotary_qkv.spec import ROTARY_QKV
from still_kernels.swi_glu.spec import SWI_GLU
from tests.plugins.builds import FOLDERS, ROOT, TOY
from tests.plugins.core_abi import Recorder, absent_inputs, shapes_of, write_archive
from tests.plugins.test_core import ABSENT, ATTRIBUTES, SIZES, variant
from tests.toy.plan import CONSTANTS
from tests.toy.plan import PLAN as TOY_PLAN
from tests.toy.spec import DECAY

CUDA = Path("/usr/local/cuda/include")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDERS or not shutil.which("cmake"), reason=f"needs cmake and {INCLUDE_VARIABLE}"),
]


KINDS = {int: "i", float: "f", str: "s"}
ELEMENTS = {"float16": "h", "float32": "f", "int32": "i"}


TYPES = {"*": "ptr", "": "i32", "~": "f32"}


def entries(kernels: dict[str, str]) -> dict[str, Any]:
    """Kernels of an archive's index by name and arguments: `name*` is a pointer, `name~` a float32, others are integers."""
    return {
        name: {
            "symbol": f"{name}_kernel",
            "threads": 128,
            "num_warps": 4,
            "shared_bytes": 1000,
            "trailing_null_pointers": 2,
            "args": [{"name": n, "type": TYPES[kind]} for n, kind in re.findall(r"(\w+)([*~]?)", arguments)],
        }
        for name, arguments in kernels.items()
    }


def both_counts(key: dict[str, Any], constants: dict[str, int], kernels: dict[str, Any]) -> list[dict[str, Any]]:
    """Variants for TensorRT's counts and for ONNX Runtime's."""
    return [
        {"key": key | {"count_dtype": count}, "arch": "sm_90", "constants": constants, "kernels": kernels}
        for count in ("int32", "int64")
    ]


ARCHIVES: dict[str, tuple[list[dict[str, Any]], dict[str, str]]] = {
    "Attention": (
        [{"head_dim": 64, "cache": cache} for cache in CACHE.choices],
        {
            "attend": "query* present_key* key_scale* output* T scale~",
            "decode": "present_value* value_scale* part_acc* counters* NS N",
        },
    ),
    "LinearAttention": (
        [{"head_dim": 64, "value_dim": 48, "shared": 2}],
        {
            "prepare": "query* decay* inverse* n_chunks scale~",
            "scan": "value* recurrent_state* before* new* first",
            "output": "query* before* new* output* scale~",
            "decode": "recurrent_state* beta* output* W",
        },
    ),
    "CausalConv": (
        [{"taps": 4}],
        {
            "conv": "input* weight* conv_state* output* C",
            "commit": "input* conv_state* T",
            "step": "input* conv_state* output* C",
        },
    ),
    "MatMulNBits": (
        [{"aligned": 0, "span": 0, "offsets": 1}],
        {
            "few": "input* blocks* zero_points* offsets* output* M ZW",
            "unpack": "scales* dense* first count",
            "multiply": "input* dense* output* N",
        },
    ),
    "RotaryQkv": ([{"gated": 1, "biased": 1}], {"rotary": "input* cos* gate_bias* query* value* gate* G"}),
    "LowRankMatMul": (
        [{"base": 1}],
        {
            "lower": "input* inner* low* R",
            "raise": "low* outer* base* output* N",
            "low_rank": "input* outer* base* output* K",
        },
    ),
    "SwiGlu": ([{}], {"swi_glu": "input* output* N"}),
    "GreedyToken": ([{"aligned": 0}], {"greedy": "logits* token* V"}),
}
"""Of an op the variants that serve calls, whose cubins are text, and what each kernel takes."""


def op_archive(folder: Path, op: str) -> Path:
    known, variants = kernels_of(op), []
    fields, kernels = ARCHIVES[op]
    for own in fields:
        served = known.variant(dtype="float16", **own)
        key = {name: getattr(served, name) for name in known.plan.key}
        variants += both_counts(key, known.build(served, 90).plan_constants, entries(kernels))
    write_archive(folder, variants, op=f"still::{op}", plan=known.plan.data)
    return folder


def toy_archive(folder: Path) -> Path:
    """The same of the toy op."""
    kernels = entries({"decay": "value* total* output* H decay~"})
    write_archive(folder, both_counts({"dtype": "float16"}, CONSTANTS, kernels), op="still::Decay", plan=TOY_PLAN.data)
    return folder


def all_archives(folder: Path) -> list[Path]:
    """Archives of every op for sm_90, float16 and both types of counts."""
    both = [variant(count_dtype=count, cache=cache) for count in ("int32", "int64") for cache in CACHE.choices]
    write_archive(folder / "hybrid", both)
    return [folder / "hybrid", *(op_archive(folder / op, op) for op in ARCHIVES), toy_archive(folder / "toy")]


def kernels_taken(archives: list[Path]) -> list[str]:
    """What the kernels of archives take, for the stand-ins."""
    letters = {"ptr": "p", "i32": "i", "f32": "f"}
    found = []
    for folder in archives:
        for entry in json.loads((folder / "index.json").read_text())["variants"][0]["kernels"].values():
            types = "".join(letters[a["type"]] for a in entry["args"]) + "p" * entry["trailing_null_pointers"]
            found.append(f"kernel={entry['symbol']}:{types}")
    return found


def compile_host(name: str, includes: list[Any], folder: Path) -> Path:
    """The program that stands for a host."""
    source, host = Path(__file__).with_name(f"fake_{name}.cpp"), folder / f"fake_{name}"
    flags = ["-std=c++17", "-Wno-deprecated-declarations", *(f"-isystem{include}" for include in includes)]
    subprocess.run(["g++", *flags, "-o", host, source, "-ldl"], check=True)
    return host


def stand_in_driver(recorder: Recorder, folder: Path) -> Path:
    """Folder in which the recording stand-in is libcuda."""
    drivers = folder / "drivers"
    drivers.mkdir()
    shutil.copyfile(recorder.path, drivers / "libcuda.so.1")
    return drivers


@pytest.mark.parametrize("include", FOLDERS)
def test_adapter(include: str, recorder: Recorder, tmp_path: Path) -> None:
    archives = all_archives(tmp_path)
    archive = pack_archive(archives, tmp_path / "kernels.bin")
    configure = ["cmake", "-S", ROOT / "plugins", "-B", tmp_path / "build", "-DSTILL_WARNINGS_AS_ERRORS=ON"]
    options = [
        f"-DTENSORRT_INCLUDE_DIR={include}",
        f"-DSTILL_ARCHIVE={archive}",
        "-DSTILL_RUNNER=ON",
        f"-DSTILL_OPS={TOY}",
    ]
    subprocess.run([*configure, *options], check=True, capture_output=True)
    done = subprocess.run(["cmake", "--build", tmp_path / "build"], capture_output=True, text=True)
    assert done.returncode == 0 and "warning" not in done.stdout + done.stderr, done.stdout + done.stderr

    libraries = sorted((tmp_path / "build/tensorrt").glob("libstill_tensorrt*.so"))
    assert len(libraries) == 2
    for library in libraries:
        symbols = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
        assert not re.search(r"nvinfer|cudart| cu[A-Z]|getPluginRegistry", symbols.stdout), (
            "links neither TensorRT nor CUDA"
        )
        exported = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
        entry = "getPluginCreators" if "tensorrt8" in library.name else "getCreators"
        assert {line.split()[-1] for line in exported.stdout.splitlines()} == {entry, "setLoggerFinder"}

    host = compile_host("tensorrt", [include, CUDA], tmp_path)
    drivers = stand_in_driver(recorder, tmp_path)

    taken = kernels_taken(archives)
    for call in CALLS:
        check_op([host, libraries[0]], drivers, *call, taken)


INT8 = {CACHE.name: "int8"}
PREFILL = ("score", "select", *("features", "scan", "linear", "attend") * 2, "commit")
HEADS, FLAT = "0.0 0.1 0.2 0.3", "0.0 0.1 0.2"
ALL_INT8 = absent_inputs(HYBRID_ATTENTION, ATTRIBUTES | INT8, "window_factor")
Shapes = tuple[tuple[str, str], tuple[str, str]]
CALLS: list[tuple[OpSpec, dict[str, Any], set[str], dict[str, int], tuple[str, ...], Shapes]] = [
    # Op, attributes, absent inputs, sizes, kernels of a call of 150 tokens and of one of a single token; shapes of output and first state
    # ("": none), by input and place, the second with heads side by side.
    (
        HYBRID_ATTENTION,
        ATTRIBUTES,
        ABSENT,
        SIZES,
        (*PREFILL, "decode"),
        ((HEADS, "0.0 1.2 8.2 0.3"), (FLAT, "0.0 8.1 8.2 8.3")),
    ),
    (
        HYBRID_ATTENTION,
        ATTRIBUTES | INT8,
        ALL_INT8,
        SIZES,
        (*PREFILL, "decode"),
        ((HEADS, "0.0 1.2 8.2 8.3"), (FLAT, "0.0 8.1 8.2 8.3")),
    ),
    (
        ATTENTION,
        {},
        set(),
        SIZES | {"N": 400},
        ("attend", "decode"),
        ((HEADS, "0.0 1.2 5.2 0.3"), (FLAT, "0.0 5.1 5.2 5.3")),
    ),
    (
        ATTENTION,
        INT8,
        set(),
        SIZES | {"N": 400},
        ("attend", "decode"),
        ((HEADS, "0.0 1.2 5.2 5.3"), (FLAT, "0.0 5.1 5.2 5.3")),
    ),
    (
        LINEAR_ATTENTION,
        {"update_rule": "gated_delta", "scale": 0.5},
        set(),
        SIZES | {"HQ": 2, "G": 2, "V": 48, "E": 1, "W": 6},
        ("prepare", "scan", "output", "decode"),
        (("0.0 0.1 2.2 0.3 2.3", "0.0 2.2 0.4 2.3"), ("0.0 0.1 3.2 0.3 6.3", "0.0 3.2 0.4 6.3")),
    ),
    (
        CAUSAL_CONV,
        {"activation": "silu"},
        {"bias"},
        SIZES | {"C": 200, "K": 4, "P": 3},
        ("conv", "commit", "step"),
        ((FLAT, "0.0 0.2 3.2"),) * 2,
    ),
    (
        MATMUL_NBITS,
        {"bits": 4, "block_size": 32},
        set(),
        SIZES | {"I": 288, "O": 77, "IW": 36, "IS": 9, "IZ": 2},
        ("unpack", "multiply", "few"),
        (("0.0 0.1 1.0", ""),) * 2,
    ),
    (
        ROTARY_QKV,
        {"query_width": 192, "key_width": 64, "value_width": 48, "gate_width": 96},
        {"gate_input"},
        SIZES | {"F": 400, "D": 64, "gate_width": 96},
        ("rotary", "rotary"),
        (("0.0 0.1 =192", "0.0 0.1 =64"),) * 2,
    ),
    (
        LOW_RANK_MATMUL,
        {},
        set(),
        SIZES | {"I": 96, "R": 16, "O": 40},
        ("lower", "raise", "low_rank"),
        (("0.0 0.1 3.2", ""),) * 2,
    ),
    (SWI_GLU, {"width": 48}, set(), SIZES | {"width": 48}, ("swi_glu", "swi_glu"), (("0.0 0.1 =48", ""),) * 2),
    (GREEDY_TOKEN, {}, set(), SIZES | {"V": 77}, ("greedy", "greedy"), (("0.0 0.1", ""),) * 2),
    (DECAY, {"decay": 0.25}, set(), SIZES, ("decay", "decay"), ((HEADS, "0.0 0.2 0.3"), (FLAT, "0.0 3.1 3.2"))),
]


def node_values(spec: OpSpec, attributes: dict[str, Any], absent: set[str]) -> dict[str, Any]:
    """Attributes of a node with what stand-ins are told beside them."""
    given = {name for name in spec.resolve(attributes).input_names() if name not in absent}
    mask = sum(1 << i for i, name in enumerate(spec.input_names()) if name not in given)
    unsaid = {a.name: a.default for a in spec.attributes if a.name not in attributes}
    return {**attributes, **unsaid, "absent_inputs": mask, "activation_type": "float16"}


def host_arguments(
    spec: OpSpec, attributes: dict[str, Any], absent: set[str], sizes: dict[str, int], flat: bool = False
) -> list[str]:
    """The call for a stand-in of a host, but for the library; with `flat` activations are [B, T, heads * D]."""
    own = spec.resolve(attributes)
    tensors = shapes_of(own, sizes | {"T": -1}, "float16", "int32", absent)
    names = [name for name in own.input_names() if name not in absent]
    roles = {t.name: t.role for t in spec.inputs}
    words = {t.name for t in own.inputs if t.dtype == "int32"}
    words |= {f"past_{s.name}" for s in own.states if s.dtype == "int32"}
    given = []
    for name, (dtype, shape) in zip(names, tensors, strict=True):
        if flat and roles.get(name) == "activation" and dtype == "float16" and len(shape) == 4:
            shape = (*shape[:2], shape[2] * shape[3])
        given.append(
            f"input={'w' if name in words else ELEMENTS[dtype]}:"
            + ".".join("T" if size < 0 else str(size) for size in shape)
        )
    for made in own.outputs if len(own.outputs) > 1 or own.outputs[0].dtype != "T" else ():
        shape = in_numbers(made.shape, {**sizes, **attributes, "T": -1})
        given.append(
            f"output={'h' if made.dtype == 'T' else 'w'}:" + ".".join("T" if size < 0 else str(size) for size in shape)
        )
    states = (i for i, name in enumerate(names) if name.startswith("past_") and name != "past_length")
    first = next(states, len(names))
    values = [f"{name}={KINDS[type(value)]}:{value}" for name, value in attributes.items()]
    return [spec.name, str(first), *values, *given]


def check_op(
    host: list[Path],
    drivers: Path,
    spec: OpSpec,
    attributes: dict[str, Any],
    absent: set[str],
    sizes: dict[str, int],
    kernels: tuple[str, ...],
    shapes: Shapes,
    taken: list[str],
) -> None:
    """One op through the host: its shapes, its launches; also with heads side by side."""
    values = node_values(spec, attributes, absent)
    both: list[list[str]] = []
    for flat, (output, state) in zip((False, True), shapes, strict=True):
        command = [*host, *host_arguments(spec, values, absent, sizes, flat), *taken]
        ran = subprocess.run(command, capture_output=True, text=True, env={"LD_LIBRARY_PATH": str(drivers)})
        lines = ran.stdout.splitlines()
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert lines[0] == f"creator {len(OPS) + 1} still {spec.name} 1 fields {len(spec.attributes) + 2}"
        expected = [f"shape 0: {output}", *([f"shape 1: {state}"] if state else [])]
        assert [line for line in lines if line.startswith("shape")][:2] == expected
        assert lines.count("enqueue 0") == 2
        assert int(next(line for line in lines if line.startswith("workspace")).split()[1]) >= 0
        launches = [line.split()[1] for line in lines if line.startswith("cuLaunchKernel")]
        assert launches == [f"{kernel}_kernel" for kernel in kernels]
        assert not [line for line in lines if line.startswith("cuMemcpyDtoD")], "past and present were one buffer"
        first = next(iter(values))
        assert f"logged still: node node7: {spec.name}: the node lacks the attribute {first}" in ran.stdout
        both.append([line for line in lines if line.startswith(("workspace", "cuLaunch"))])
    assert both[0] == both[1], "the same launches, however heads lie"
