"""The core launches what the Python launcher launches: same kernels, grids, numbers and pointers, same workspace."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from still_export.targets.trt.plugins import pack_archive
from still_graphs.ops import OpSpec
from still_graphs.spec import CACHE
from still_kernels import aot, launcher
from still_kernels.common import cuda_function
from still_kernels.common.cubin import DESCRIPTOR
from still_kernels.common.cuda_function import CudaFunction
from still_kernels.hybrid_attention import plan as variants
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.hybrid_attention.plan import Variant
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION
from still_kernels.plan import ELEMENTS
from tests.cubins import cubin, info
from tests.plugins.core_abi import Core, Recorder, Tensor

launch = pytest.importorskip("still_kernels.hybrid_attention.launch")

TYPES = {"ptr": "p", "i32": "i", "f32": "f", "descriptor": "diill"}
TRITON_SIZES = {"*": (8,), "i32": (4,), "fp32": (4,), "tensordesc": DESCRIPTOR}
SCRATCH = (8, 8)
"""Pointers to the memory of a launch and of profiles, which Triton gives every kernel behind its arguments."""
C_SIZES = {"int": 4, "float": 4}
ELEMENT_CODES = {"fp16": 6, "bf16": 9, "fp8e4nv": 0}  # of the driver
NAMES = {torch.float16: "float16", torch.float32: "float32", torch.int32: "int32", torch.bfloat16: "bfloat16"}
CASES = [
    # batch, tokens, capacity tokens, select_scope, overflow, gate, dtype, cache
    (1, 1, 4096, "q_head", "error", "channel", torch.float16, "float"),
    (3, 1, 65536, "kv_group_max", "error", "none", torch.bfloat16, "float"),
    (8, 1, 65536, "q_head", "error", "channel", torch.float16, "float"),
    (12, 1, 65536, "q_head", "error", "none", torch.bfloat16, "float"),  # clusters of two blocks
    (32, 1, 4096, "q_head", "error", "channel", torch.bfloat16, "float"),  # of one
    (1, 1, 4096, "kv_group_max", "error", "channel", torch.float16, "float"),
    (1, 1, 65536, "kv_group_mean", "error", "channel", torch.bfloat16, "float"),  # no clusters
    (2, 1, 4096, "q_head", "error", "channel", torch.float32, "float"),
    (2, 1, 640, "q_head", "fold_oldest", "channel", torch.float16, "float"),
    (2, 2, 4096, "q_head", "error", "channel", torch.float16, "float"),
    (2, 300, 4096, "kv_group_mean", "error", "channel", torch.float16, "float"),
    (1, 2048, 65536, "q_head", "error", "none", torch.float16, "float"),
    (1, 300, 640, "q_head", "fold_oldest", "channel", torch.float32, "float"),
    (1, 20000, 65536, "q_head", "error", "channel", torch.float16, "float"),
    (2, 100, 128, "q_head", "error", "channel", torch.bfloat16, "float"),  # no slot
    (3, 200, 4096, "q_head", "error", "channel", torch.bfloat16, "float"),
    (3, 70, 640, "kv_group_max", "fold_oldest", "none", torch.float16, "float"),
    (1, 1, 65536, "q_head", "error", "channel", torch.float16, "int8"),
    (2, 300, 4096, "kv_group_max", "error", "none", torch.bfloat16, "int8"),
    (1, 300, 640, "q_head", "fold_oldest", "channel", torch.float16, "int8"),
    (3, 200, 4096, "q_head", "error", "channel", torch.float32, "int8"),
]


@pytest.fixture(scope="module")
def fake_compiler() -> Any:
    """Compilers whose cubins say their arguments, as Triton's and NVRTC's do: the index is real, the code is not."""
    import triton

    counter = itertools.count()

    def fake(symbol: str, sizes: Iterable[int], cluster: int = 1) -> bytes:
        blocks = (cluster, 1, 1) if cluster > 1 else None
        return cubin(info([*sizes], blocks), symbol, f"code {next(counter):06}".encode())

    def compile_nothing(source: Any, target: Any, options: dict[str, Any]) -> Any:
        metadata = types.SimpleNamespace(
            name=source.fn.__name__,
            num_warps=options["num_warps"],
            shared=1000,
            global_scratch_size=0,
            profile_scratch_size=0,
            tensordesc_meta=[
                {"swizzle": 3, "block_size": [int(rows), min(int(columns), 128 if element == "fp8e4nv" else 64)]}
                for kind in source.signature.values()
                for element, rows, columns in re.findall(r"^tensordesc<(\w+)\[(\d+), (\d+)\]", kind)
            ],
        )
        kinds = [kind for kind in source.signature.values() if kind != "constexpr"]
        sizes = [size for kind in kinds for size in TRITON_SIZES[re.match(r"\*|\w+", kind)[0]]]
        code = fake(metadata.name, [*sizes, *SCRATCH])
        return types.SimpleNamespace(metadata=metadata, asm={"cubin": code})

    def no_cuda(function: Any, arch: int, macros: tuple[tuple[str, int], ...], absent: tuple[str, ...]) -> Any:
        shared = function.shared_bytes(dict(macros))
        taken = (kind for name, kind in function.arguments.items() if name not in absent)
        sizes = (8 if kind.endswith("*") else C_SIZES[kind] for kind in taken)
        code = fake(function.symbol, sizes, dict(macros).get(function.cluster, 1))
        return cuda_function.Compiled(code, function.symbol, shared)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "compile", compile_nothing)
        patch.setattr(cuda_function, "_compiled", no_cuda)
        patch.setattr(aot, "nvrtc", lambda: (None, (0, 0)))
        for module in (launch, variants):
            patch.setattr(module, "can_compile", lambda: True)
        yield


def config_of(scope: str, overflow: str, gate: str, capacity: int, cache: str) -> HybridAttentionConfig:
    return HybridAttentionConfig(
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        chunk_size=64,
        salient_per_chunk=4
        if overflow == "error"
        else 32,  # as kernels compiled ahead have room for, where that counts
        select_scope=scope,
        gate=gate,
        capacity_tokens=capacity,
        overflow=overflow,
        mix_epsilon=1e-5,
        cache=None if cache == CACHE.default else cache,
    )


def call_tensors(case: Any, config: HybridAttentionConfig) -> dict[str, torch.Tensor]:
    """Inputs of a call by the op's names, without data."""
    batch, tokens, _, _, _, gate, dtype, _ = case
    lead, count = (batch, tokens), torch.int32
    state = HybridAttentionState.empty(config, batch, dtype, "meta")
    tensors = {
        "query": torch.empty(*lead, 8, 64, dtype=dtype, device="meta"),
        "key": torch.empty(*lead, 2, 64, dtype=dtype, device="meta"),
        "value": torch.empty(*lead, 2, 64, dtype=dtype, device="meta"),
        "feature_q_weight": torch.empty(8, 64, 64, dtype=dtype, device="meta"),
        "feature_k_weight": torch.empty(8, 64, 64, dtype=dtype, device="meta"),
        **{f"past_{name}": tensor for name, tensor in state.tensors().items()},
        "past_length": torch.empty(state.length.shape, dtype=count, device="meta"),
    }
    if gate == "channel":
        tensors["gate"] = torch.empty_like(tensors["query"])
    return tensors | {"new_tokens": torch.empty(batch, dtype=count, device="meta")}


def labels_of(argument: dict[str, Any]) -> list[str]:
    """Names of the values that an argument of the index becomes; the first is the kernel's."""
    name = {"ptr": "p_", "descriptor": "d_"}.get(argument["type"], "") + argument["name"]
    more = ("rows", "columns", "row_stride", "stride") if argument["type"] == "descriptor" else ()
    return [name, *(f"{name}.{part}" for part in more)]


def check_descriptor(got: list[str], argument: dict[str, Any], wanted: Any, expected: int) -> None:
    """A descriptor of the core against what Python hands to Triton; of a tensor without elements it is never read."""
    if got[1] == "0":
        assert got[0] == "/".join("0" * 8)
        return
    rows, columns = wanted.shape
    assert wanted.strides == [columns, 1] and list(map(int, got[1:])) == [rows, columns, columns, 1]
    element, address, *sizes, swizzle = map(int, got[0].split("/"))
    assert (element, address) == (ELEMENT_CODES[argument["element"]], expected)
    size = wanted.base.itemsize
    assert sizes == [columns, rows, size * columns, min(wanted.block_shape[1], 128 // size), wanted.block_shape[0]]
    kinds = {"fp16": "float16", "bf16": "bfloat16", "fp8e4nv": "float8_e4m3fn"}
    assert swizzle == 3 and str(wanted.base.dtype) == f"torch.{kinds[argument['element']]}"


def storage(tensor: torch.Tensor) -> int:
    """What a tensor and its views in other types share."""
    return int(tensor.untyped_storage()._cdata)


@pytest.fixture
def mirror(
    core: Core, recorder: Recorder, fake_compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """The comparison, for any op: see `compare`."""
    return functools.partial(compare, core, recorder, tmp_path, monkeypatch)


def compare(
    core: Core,
    recorder: Recorder,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    spec: OpSpec,
    tensors: dict[str, torch.Tensor],
    run: Callable[..., None],
    variant: Any,
    attributes: dict[str, Any],
    outputs: dict[str, torch.Tensor] | None = None,
) -> None:
    """Record what `run` launches from Python and what the core launches for the same tensors, and compare.

    Args:
        tensors: Inputs of the call by the op's names, without data. `run` gets the outputs and makes the call.
        variant: Of the kernels that serve it.
        outputs: Those that are no states, by name; None: "output", as the op's first input.
    """
    made = {"output": torch.empty_like(next(iter(tensors.values())))} if outputs is None else outputs
    names = [n for n in spec.input_names() if n in tensors]
    at = {n: 0x100000 * (i + 1) for i, n in enumerate(names)}
    at |= {n: 0x9000000 + 0x100000 * i for i, n in enumerate(made)}

    # Python: addresses of tensors that are no tensors of this machine, workspace one buffer behind the other
    known = {id(tensor): at[name] for name, tensor in tensors.items()}
    words = {storage(tensor): at[name] for name, tensor in tensors.items()}  # of which codes are views
    workspace, used = 0x70000000, [0]
    expected: list[tuple[launcher.PreparedLaunch, dict[str, Any]]] = []

    def allocate(like: torch.Tensor, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        buffer = torch.empty(shape, dtype=kind, device="meta")
        known[id(buffer)] = words[storage(buffer)] = workspace + used[0]
        kept.append(buffer)
        used[0] += -(-math.prod(shape) * ELEMENTS[str(kind).removeprefix("torch.")] // 256) * 256
        return buffer

    def record(self: Any, one: launcher.PreparedLaunch, values: list[Any], variant: object) -> None:
        expected.append((one, dict(zip(one.function.arg_names, values, strict=True))))

    counters = torch.empty(4096, dtype=torch.int32, device="meta")
    known |= {id(tensor): at[name] for name, tensor in made.items()} | {id(counters): -1}
    kept = [counters]
    monkeypatch.setattr(launcher, "allocate", allocate)
    monkeypatch.setattr(launcher.Launcher, "launch", record)
    monkeypatch.setattr(launcher, "persistent_counters", lambda device, size: counters)
    monkeypatch.setattr(launcher, "arch_of", lambda device: 90)
    run(*made.values())

    # C++: an archive whose index is real
    index = aot.write_archive(folder / "aot", [90], spec.name, [variant])
    core.call("still_add_archive", str(pack_archive([folder / "aot"], folder / "kernels.bin")).encode())
    kernels = index["variants"][0]["kernels"]
    for kernel in kernels.values():
        signature = "".join(TYPES[a["type"]] for a in kernel["args"])
        recorder.arguments(kernel["symbol"], signature + "p" * kernel["trailing_null_pointers"])
    absent = sum(1 << i for i, n in enumerate(spec.input_names()) if n not in tensors)
    op = core.op(spec.name, attributes, absent)
    assert op.names("input") == names
    inputs: list[Tensor] = [(NAMES[tensors[n].dtype], tuple(tensors[n].shape)) for n in names]
    op.prepare(inputs)
    results_of = op.names("output")
    assert outputs is None or [n for n in results_of if n in outputs or not n.startswith("present_")] == list(outputs)
    results = [at[n.replace("present_", "past_")] for n in results_of]
    op.launch([at[n] for n in names], results, workspace, 0)

    launches = recorder.launches()
    assert expected
    assert [name for name, _ in launches] == [kernels[one.name]["symbol"] for one, _ in expected]
    for (one, values), (_, fields) in zip(expected, launches, strict=True):
        name, kernel = one.name, kernels[one.name]
        assert fields["grid"] == ",".join(map(str, one.grid)) and one.grid[0] % kernel.get("cluster", 1) == 0, name
        assert fields["block"] == f"{kernel['threads']},1,1" and fields["shared"] == str(kernel["shared_bytes"]), name
        if isinstance(one.function, CudaFunction):
            constants = one.tile.constants
            assert (kernel.get("cluster", 1), kernel["threads"]) == (constants.get("CL", 1), 32 * one.tile.num_warps)
            assert kernel["shared_bytes"] == one.function.shared_bytes(values)
            assert "CL" not in constants or one.grid[0] == values["H"] // constants["GR"] * constants["CL"]
        labels = [label for argument in kernels[name]["args"] for label in labels_of(argument)]
        got = dict(zip(labels, fields["args"].split(","), strict=False))
        for argument in kernels[name]["args"]:
            key = labels_of(argument)[0]
            wanted = values[key]
            if argument["type"] == "descriptor":
                address = known.get(id(wanted.base)) or words[storage(wanted.base)]
                check_descriptor([got[label] for label in labels_of(argument)], argument, wanted, address)
            elif argument["type"] != "ptr":
                assert float(got[key]) == pytest.approx(float(wanted), rel=1e-5), (name, key)
            elif wanted is counters:
                assert int(got[key]) not in (0, *at.values()) and int(got[key]) < workspace
            else:
                assert int(got[key]) == (0 if wanted is None else known.get(id(wanted)) or words[storage(wanted)]), (
                    name,
                    key,
                )
        missing = {n for n, value in values.items() if isinstance(value, torch.Tensor)} - got.keys()
        assert not missing, f"{name} has pointers that the compiled kernel does not take: {missing}"
    assert used[0] <= op.workspace(inputs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_core_mirrors_the_python_launcher(case: Any, mirror: Callable[..., None]) -> None:
    _, _, capacity, scope, overflow, gate, dtype, cache = case
    config = config_of(scope, overflow, gate, capacity, cache)
    tensors = call_tensors(case, config)
    states = {n.removeprefix("past_"): t for n, t in tensors.items() if n.startswith("past_")}
    inputs = Inputs(**{field.name: tensors.get(field.name) for field in dataclasses.fields(Inputs)})

    def run(output: torch.Tensor) -> None:
        launch.launch_hybrid_attention(inputs, config, HybridAttentionState(**states), output)

    variant = Variant(
        dtype=NAMES[dtype],
        head_dim=64,
        chunk_size=64,
        feature_rows=64,
        gate=int(gate == "channel"),
        select_scope=scope,
        overflow=overflow,
        cache=cache,
        count_dtype="int32",
    )
    mirror(HYBRID_ATTENTION, tensors, run, variant, config.attributes())
