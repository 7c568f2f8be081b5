"""The core's C ABI by ctypes, and small archives and calls to drive it with."""

import ctypes
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from still_export.targets.trt.plugins import pack_archive
from still_graphs.ops import OpSpec
from still_graphs.spec import dimension
from still_kernels.hybrid_attention.plan.launches import PLAN

TYPES = {"float32": 1, "float16": 2, "bfloat16": 3, "int32": 4, "int64": 5}
NAMES = {number: name for name, number in TYPES.items()}


class TensorStruct(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("rank", ctypes.c_int32), ("dims", ctypes.c_int64 * 8))


class AttributeStruct(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_int32),
        ("integer", ctypes.c_int64),
        ("real", ctypes.c_double),
        ("text", ctypes.c_char_p),
    )


Tensor = tuple[str, tuple[int, ...]]


def tensor_array(tensors: list[Tensor]) -> Any:
    array = (TensorStruct * len(tensors))()
    for item, (dtype, shape) in zip(array, tensors, strict=True):
        item.type, item.rank = TYPES[dtype], len(shape)
        item.dims[: len(shape)] = list(shape)
    return array


class CoreError(Exception):
    """still_last_error() of a failed call."""


class Core:
    """The library libstill_core with error codes turned into CoreError."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.still_last_error.restype = ctypes.c_char_p
        self.library.still_op_input_name.restype = ctypes.c_char_p
        self.library.still_op_output_name.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        if getattr(self.library, name)(*arguments):
            raise CoreError(self.library.still_last_error().decode())

    def op(self, name: str, attributes: dict[str, int | float | str], absent: int = 0) -> "CoreOp":
        items = (AttributeStruct * len(attributes))()
        for item, (key, value) in zip(items, attributes.items(), strict=True):
            item.name = key.encode()
            item.kind = 0 if isinstance(value, int) else 1 if isinstance(value, float) else 2
            item.integer = value if isinstance(value, int) else 0
            item.real = value if isinstance(value, float) else 0.0
            item.text = value.encode() if isinstance(value, str) else None
        handle = ctypes.c_void_p()
        self.call("still_op_create", name.encode(), items, len(items), ctypes.c_uint64(absent), ctypes.byref(handle))
        return CoreOp(self, handle)


@dataclass
class CoreOp:
    """One still_op."""

    core: Core
    handle: ctypes.c_void_p

    def names(self, kind: str) -> list[str]:
        found, function = [], getattr(self.core.library, f"still_op_{kind}_name")
        while (name := function(self.handle, len(found))) is not None:
            found.append(name.decode())
        return found

    def infer(self, inputs: list[Tensor]) -> list[Tensor]:
        outputs = (TensorStruct * len(self.names("output")))()
        self.core.call("still_op_infer", self.handle, tensor_array(inputs), len(inputs), outputs, len(outputs))
        return [(NAMES[o.type], tuple(o.dims[: o.rank])) for o in outputs]

    def workspace(self, largest: list[Tensor]) -> int:
        size = ctypes.c_size_t()
        self.core.call("still_op_workspace", self.handle, tensor_array(largest), len(largest), ctypes.byref(size))
        return size.value

    def prepare(self, inputs: list[Tensor]) -> None:
        self.core.call("still_op_prepare", self.handle, tensor_array(inputs), len(inputs))

    def launch(self, inputs: list[int], outputs: list[int], workspace: int, stream: int) -> None:
        self.core.call(
            "still_op_launch",
            self.handle,
            (ctypes.c_void_p * len(inputs))(*inputs),
            (ctypes.c_void_p * len(outputs))(*outputs),
            ctypes.c_void_p(workspace),
            ctypes.c_void_p(stream),
        )


class Recorder:
    """The recording stand-in for libcuda."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.recording_log.restype = ctypes.c_char_p

    def reset(self, architecture: int = 90) -> None:
        self.library.recording_reset()
        self.library.recording_architecture(architecture)

    def log(self, call: str = "") -> list[str]:
        """Lines of the calls so far, those of `call` only where it is named."""
        lines = self.library.recording_log().decode().splitlines()
        return [line for line in lines if line.startswith(call)]

    def launches(self) -> list[tuple[str, dict[str, str]]]:
        """Entry point and fields of each launch, in order."""
        result = []
        for line in self.log("cuLaunchKernel"):
            _, symbol, *fields = line.split(" ")
            result.append((symbol, dict(field.split("=", 1) for field in fields)))
        return result

    def arguments(self, symbol: str, types: str) -> None:
        self.library.recording_arguments(symbol.encode(), types.encode())

    def fail(self, call: str, status: int) -> None:
        self.library.recording_fail(call.encode(), status)


def compile_recorder(folder: Path) -> Path:
    target = folder / "librecording_driver.so"
    source = Path(__file__).with_name("recording_driver.cpp")
    subprocess.run(["g++", "-std=c++17", "-O1", "-Wall", "-shared", "-fPIC", "-o", target, source], check=True)
    return target


def write_archive(folder: Path, variants: list[dict[str, Any]], **changes: Any) -> Path:
    """A packed archive whose cubins are text; every kernel's cubin is named after it."""
    folder.mkdir(parents=True, exist_ok=True)
    index = {
        "format": "still-kernels-aot",
        "version": 3,
        "op": "still::HybridAttention",
        "op_version": 1,
        "plan": PLAN.data,
        "variants": variants,
        **changes,
    }
    for variant in variants:
        for name, kernel in variant["kernels"].items():
            kernel.setdefault("cubin", f"{variant['arch']}-{name}.cubin")
            (folder / kernel["cubin"]).write_text(f"{variant['arch']} {name}".ljust(64))
    (folder / "index.json").write_text(json.dumps(index))
    return pack_archive([folder], folder / "kernels.bin")


def absent_inputs(spec: OpSpec, attributes: dict[str, Any], *others: str) -> set[str]:
    """Inputs that a call lacks: states that the op does not have with these attributes, and `others`. Scales go without saying."""
    return {f"past_{s.name}" for s in spec.resolve(attributes).states if not s.exists(attributes)} | set(others)


def shapes_of(spec: OpSpec, sizes: dict[str, int], dtype: str, count: str, absent: set[str]) -> list[Tensor]:
    """Types and shapes of the inputs of a call, in order, without those in `absent`; `spec` is resolved where states are in codes."""

    def size(dim: str | int) -> int:
        if isinstance(dim, int) or dim.isdigit():
            return int(dim)
        factor, symbol, divisor = dimension(dim)
        return factor * sizes[symbol] // divisor

    types = {"T": dtype, "float32": "float32", "int64": count, "int32": "int32"}
    specs = [(t.name, t) for t in spec.inputs] + [(f"past_{s.name}", s) for s in spec.states]
    return [(types[t.dtype], tuple(size(d) for d in t.shape)) for name, t in specs if name not in absent]
