"""What the core launches beside what Python launches for the same call, over compilers that compile nothing."""

import dataclasses
import itertools
import math
import re
import types
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from still_export.targets.trt.plugins import pack_archive
from still_kernels import aot, launcher
from still_kernels.common import cuda_function
from still_kernels.common.cubin import DESCRIPTOR
from still_kernels.common.cuda_function import CudaFunction
from still_kernels.hybrid_attention import launch
from still_kernels.hybrid_attention import plan as variants
from still_kernels.plan import ELEMENTS
from still_kernels.registry import kernels_of
from tests.cubins import cubin, info
from tests.plugins.core_abi import Core, Recorder, Tensor

TYPES = {"ptr": "p", "i32": "i", "f32": "f", "descriptor": "diill"}
TRITON_SIZES = {"*": (8,), "i32": (4,), "fp32": (4,), "tensordesc": DESCRIPTOR}
SCRATCH = (8, 8)
"""Pointers to the memory of a launch and of profiles, which Triton gives every kernel behind its arguments."""
C_SIZES = {"int": 4, "float": 4}
ELEMENT_CODES = {"fp16": 6, "bf16": 9, "fp8e4nv": 0}  # of the driver
NAMES = {torch.float16: "float16", torch.float32: "float32", torch.int32: "int32", torch.bfloat16: "bfloat16"}


def made(*shape: int, kind: torch.dtype = torch.float16) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=kind, device="meta")


def fake_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr(triton, "compile", compile_nothing)
    monkeypatch.setattr(cuda_function, "_compiled", no_cuda)
    monkeypatch.setattr(aot, "nvrtc", lambda: (None, (0, 0)))
    for module in (launch, variants):
        monkeypatch.setattr(module, "can_compile", lambda: True)


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


def compare(
    core: Core,
    recorder: Recorder,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    tensors: dict[str, torch.Tensor],
    attributes: dict[str, Any],
    fields: dict[str, Any],
    outputs: dict[str, torch.Tensor] | None = None,
    run: Callable[..., None] | None = None,
) -> None:
    """Record what Python launches and what the core launches for the same tensors of an op, and compare.

    Args:
        tensors: Inputs of the call by the op's names, without data.
        fields: Of the variant of the kernels that serve it.
        run: Gets the outputs and makes the call; None: of an op without a state.
        outputs: Those that are no states, by name; None: "output", as the op's first input.
    """
    kernels, spec = kernels_of(name), kernels_of(name).spec
    variant = kernels.variant(**fields)
    results_by_name = {"output": torch.empty_like(next(iter(tensors.values())))} if outputs is None else outputs
    names = [n for n in spec.input_names() if n in tensors]
    at = {n: 0x100000 * (i + 1) for i, n in enumerate(names)}
    at |= {n: 0x9000000 + 0x100000 * i for i, n in enumerate(results_by_name)}

    # Python: addresses of tensors that are no tensors of this machine, workspace one buffer behind the other
    known = {id(tensor): at[name] for name, tensor in tensors.items()}
    words = {storage(tensor): at[name] for name, tensor in tensors.items()}  # of which codes are views
    fake_compilers(monkeypatch)
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
    known |= {id(tensor): at[name] for name, tensor in results_by_name.items()} | {id(counters): -1}
    kept = [counters]
    monkeypatch.setattr(launcher, "allocate", allocate)
    monkeypatch.setattr(launcher.Launcher, "launch", record)
    monkeypatch.setattr(launcher, "persistent_counters", lambda device, size: counters)
    monkeypatch.setattr(launcher, "arch_of", lambda device: 90)
    (run or stateless_call(spec, tensors, attributes))(*results_by_name.values())

    # C++: an archive whose index is real
    index = aot.write_archive(folder / "aot", [90], spec.name, [variant])
    core.call("still_add_archive", str(pack_archive([folder / "aot"], folder / "kernels.bin")).encode())
    compiled = index["variants"][0]["kernels"]
    for kernel in compiled.values():
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
    assert [name for name, _ in launches] == [compiled[one.name]["symbol"] for one, _ in expected]
    for (one, values), (_, fields) in zip(expected, launches, strict=True):
        name, kernel = one.name, compiled[one.name]
        assert fields["grid"] == ",".join(map(str, one.grid)) and one.grid[0] % kernel.get("cluster", 1) == 0, name
        assert fields["block"] == f"{kernel['threads']},1,1" and fields["shared"] == str(kernel["shared_bytes"]), name
        if isinstance(one.function, CudaFunction):
            constants = one.tile.constants
            assert (kernel.get("cluster", 1), kernel["threads"]) == (constants.get("CL", 1), 32 * one.tile.num_warps)
            assert kernel["shared_bytes"] == one.function.shared_bytes(values)
            assert "CL" not in constants or one.grid[0] == values["H"] // constants["GR"] * constants["CL"]
        labels = [label for argument in compiled[name]["args"] for label in labels_of(argument)]
        got = dict(zip(labels, fields["args"].split(","), strict=False))
        for argument in compiled[name]["args"]:
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


def stateless_call(spec: Any, tensors: dict[str, torch.Tensor], attributes: dict[str, Any]) -> Callable[..., None]:
    """Launches an op without a state."""
    plan = import_module(f"{spec.package}.plan")
    kind = getattr(plan, "Inputs", None) or import_module(f"{spec.package}.meaning").Inputs
    asked = [f.name for f in dataclasses.fields(kind) if f.name in tensors or f.default is dataclasses.MISSING]
    given = kind(**{name: tensors.get(name) for name in asked} | attributes)
    return lambda *results: plan.OP.launch(given, *results)
