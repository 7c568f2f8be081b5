"""TensorRT and the CUDA driver for tests without either: device memory is host memory, an engine is an ONNX Runtime session.

`install` puts both where the runner looks for them, so that its own logic runs: binding, pieces, growth, graphs, errors.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from still_export.runners import cuda_driver
from still_graphs.passes.add_greedy_token import add_greedy_token
from still_graphs.passes.lower_integers import lower_integers

PLAN = b"a plan"


class HostDriver:
    """The calls of `cuda_driver.Driver` over host memory; `limit` bytes of it, if given."""

    def __init__(self, device: int = 0) -> None:
        self.name, self.architecture, self.stream = "stand-in", 90, ctypes.c_void_p(1)
        self.blocks: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.limit = 1 << 40
        self.allocations = 0
        self.library = types.SimpleNamespace(cuMemFree_v2=lambda address: self.blocks.pop(address.value, None))

    def memory(self) -> tuple[int, int]:
        used = sum(len(b) for b in self.blocks.values())
        return self.limit - used, self.limit

    def synchronize(self) -> None:
        pass

    def call(self, name: str, *arguments: Any) -> None:
        values = [getattr(a, "value", a) for a in arguments]
        if name == "cuMemAlloc_v2":
            if values[1] > self.memory()[0]:
                raise cuda_driver.CudaError("cuMemAlloc failed", cuda_driver.OUT_OF_MEMORY)
            block = ctypes.create_string_buffer(b"\xff" * values[1], values[1])  # NaN wherever nobody wrote
            self.blocks[ctypes.addressof(block)] = block
            arguments[0]._obj.value = ctypes.addressof(block)
            self.allocations += 1
        elif name == "cuMemsetD8Async":
            ctypes.memset(*values[:3])
        elif name in ("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"):
            ctypes.memmove(*values[:3])
        else:
            raise AssertionError(f"unexpected driver call {name}")

    def copy(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, rows: int) -> None:
        for row in range(rows):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, min(target_pitch, source_pitch))

    def capture(self, work: Callable[[], None]) -> Any:
        """Replays do the work; capturing does not."""
        return types.SimpleNamespace(launch=work)


class FakeContext:
    """An execution context that runs the session on what lies at the bound addresses."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.device_memory = 0
        self.profile = -1

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        tokens = self.shapes["input_ids"][1]
        assert self.device_memory, "contexts share one scratch memory"
        assert (tokens == 1) == (self.profile == 1), "one token runs in the decode profile"
        self.engine.calls.append(tokens)
        session = self.engine.session
        feeds = {i.name: self._array(i.name, self.shapes[i.name], i.type).copy() for i in session.get_inputs()}
        names = [o.name for o in session.get_outputs()]
        for name, value in zip(names, session.run(None, feeds), strict=True):
            ctypes.memmove(self.addresses[name], np.ascontiguousarray(value).ctypes.data, value.nbytes)
        return True

    def _array(self, name: str, shape: tuple[int, ...], kind: str) -> np.ndarray:
        dtype = np.dtype({"float": "f4", "float16": "f2", "int32": "i4"}[kind[7:-1]])
        size = int(np.prod(shape)) * dtype.itemsize
        return np.frombuffer(ctypes.string_at(self.addresses[name], size), dtype).reshape(shape)


class FakeEngine:
    """Holds the session; counts calls by their tokens."""

    device_memory_size = 1000

    def __init__(self, model: onnx.ModelProto) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self.session: Any = onnxruntime.InferenceSession(model.SerializeToString(), options)
        self.calls: list[int] = []

    def create_execution_context_without_device_memory(self) -> FakeContext:
        return FakeContext(self)

    def get_tensor_dtype(self, name: str) -> str:
        kind = next(o.type for o in self.session.get_outputs() if o.name == name)
        return {"tensor(float)": "DataType.FLOAT", "tensor(float16)": "DataType.HALF"}[kind]


def install(patch: pytest.MonkeyPatch, portable: onnx.ModelProto) -> types.SimpleNamespace:
    """TensorRT 10 on a GPU of capability 9.0, whose engines run `portable`; the module that `import tensorrt` gives."""
    model = onnx.ModelProto()
    model.CopyFrom(portable)
    add_greedy_token(model)
    lower_integers(model)
    module = types.SimpleNamespace(__version__="10.3.0", engine=FakeEngine(model), loaded=[])
    module.Logger = type("Logger", (), {"ERROR": 1, "__init__": lambda self, severity: None})
    read = lambda plan: module.engine if plan == PLAN else None  # noqa: E731
    module.Runtime = lambda logger: types.SimpleNamespace(deserialize_cuda_engine=read)
    registry = types.SimpleNamespace(load_library=lambda path: module.loaded.append(Path(path).name) or object())
    module.get_plugin_registry = lambda: registry
    patch.setitem(__import__("sys").modules, "tensorrt", module)
    patch.setattr("still_export.runners.tensorrt.Driver", HostDriver)
    return module
