"""TensorRT's engine and execution context for tests: a lowered graph on ONNX Runtime, over addresses of the stand-in driver."""

from __future__ import annotations

import ctypes
import json
import types
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from still_graphs.ops import DOMAIN, OPS
from still_graphs.spec import CACHE
from tests.still_export.fake_cuda import HostDriver
from tests.still_graphs.passes import attach_functions
from tests.still_graphs.protos import Rewriter, attribute, dimensions, drop_attribute, set_opset, value_names
from tests.still_graphs.small_graph import split_heads

NUMPY = {"float": "f4", "float16": "f2", "int32": "i4"}
TYPES = {"tensor(float)": "DataType.FLOAT", "tensor(float16)": "DataType.HALF", "tensor(int32)": "DataType.INT32"}


def restore_bodies(model: onnx.ModelProto) -> None:
    """Undo what the lowering did to still nodes and to opset 23's spelling, and give the nodes their bodies, in place."""
    rewriter = Rewriter(model.graph, value_names(model.graph))
    dims = dimensions(model.graph)
    for node in model.graph.node:
        if node.op_type.startswith("Reduce") and attribute(node, "axes") is not None:
            node.input.append(rewriter.constant(attribute(node, "axes"), "int64"))
            drop_attribute(node, "axes")
        if node.op_type == "Split" and len(node.input) < 2 and attribute(node, "num_outputs") is None:
            node.attribute.append(helper.make_attribute("num_outputs", len(node.output)))
        behind = _restore(node, rewriter, dims) if node.domain == DOMAIN else []
        rewriter.nodes += [node, *behind]
    rewriter.finish()
    set_opset(model, "", 23)
    model.ir_version = 10
    model.CopyFrom(onnx.shape_inference.infer_shapes(model))  # the heads that were split again
    attach_functions(model)


def _restore(node: onnx.NodeProto, rewriter: Rewriter, dims: dict[str, list[int | str | None]]) -> list[onnx.NodeProto]:
    """Undo it for one node; what belongs behind it."""
    spec = OPS[node.op_type].resolve({CACHE.name: attribute(node, CACHE.name, CACHE.default)})
    absent, given, results = attribute(node, "absent_inputs"), iter(list(node.input)), iter(list(node.output))
    kinds = [t.dtype for t in spec.inputs] + [s.dtype for s in spec.states]
    missing = {name for i, name in enumerate(spec.input_names()) if absent >> i & 1}
    node.input[:] = [
        ""
        if name in missing
        else next(given)
        if kind != "int64"
        else rewriter.node("Cast", [next(given)], hint=f"{node.name}.{name}", to=TensorProto.INT64)
        for name, kind in zip(spec.input_names(), kinds, strict=True)
    ]
    made = ["" if n.replace("present_", "past_", 1) in missing else next(results, None) for n in spec.output_names()]
    node.output[:] = [name for name in made if name is not None]  # what a call may lack is last
    for name in ("plugin_namespace", "plugin_version", "absent_inputs", "activation_type"):
        drop_attribute(node, name)
    if len(dims[node.input[0]]) == len(spec.inputs[0].shape):
        return []
    sized = (n for n, t in zip(node.input, spec.all_inputs(), strict=True) if t.role == "state" and t.shape[-1] == "D")
    return [split_heads(node, rewriter, dims[next(sized)][-1])]


class Context:
    """An execution context that runs the session on what lies at the bound addresses."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.device_memory, self.profile = 0, -1

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return profile < len(self.engine.head["profiles"])

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self.engine.head["profiles"][self.profile][name]
        self.shapes[name] = tuple(shape)
        return len(shape) == len(least) and all(a <= n <= b for a, n, b in zip(least, shape, most, strict=True))

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return name in self.engine.names

    def execute_async_v3(self, stream: int) -> bool:
        engine, shapes, addresses = self.engine, dict(self.shapes), dict(self.addresses)
        assert self.device_memory, "contexts share one scratch memory"
        assert not engine.head["stripped"] or engine.refitted, "an engine without weights"
        missing = set(engine.names) - set(addresses)
        assert not missing, f"no address for {missing}"

        def work() -> None:
            engine.calls.append(shapes["input_ids"][1])
            feeds = {i.name: _array(addresses[i.name], shapes[i.name], i.type) for i in engine.session.get_inputs()}
            names = [o.name for o in engine.session.get_outputs()]
            for name, value in zip(names, engine.session.run(None, feeds), strict=True):
                HostDriver.check(addresses[name], value.nbytes)
                ctypes.memmove(addresses[name], np.ascontiguousarray(value).ctypes.data, value.nbytes)

        HostDriver.submit(work)
        return True


class NewContext(Context):
    """Since TensorRT 10."""

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size >= self.engine.scratch and memory % 16 == 0
        self.device_memory = memory


def _array(address: int, shape: tuple[int, ...], kind: str) -> np.ndarray:
    dtype = np.dtype(NUMPY[kind[7:-1]])
    size = int(np.prod(shape)) * dtype.itemsize
    HostDriver.check(address, size)
    return np.frombuffer(ctypes.string_at(address, size), dtype).reshape(shape).copy()


class Engine:
    """Holds the session; counts calls by their tokens."""

    scratch = 1000

    def __init__(self, major: int, head: dict[str, Any], model: bytes) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self.session: Any = onnxruntime.InferenceSession(model, options)
        self.names = [x.name for x in (*self.session.get_inputs(), *self.session.get_outputs())]
        self.head, self.major, self.refitted = head, major, False
        self.calls: list[int] = []
        if major < 11:
            self.device_memory_size = self.scratch
            self.create_execution_context_without_device_memory = lambda: Context(self)
        if major >= 10:
            self.device_memory_size_v2 = self.scratch
        self.num_io_tensors = len(self.names)

    def create_execution_context(self, strategy: str = "STATIC") -> Context:
        """With memory of its own, unless the user manages it."""
        context = Context(self) if self.major < 10 else NewContext(self)
        context.device_memory = strategy == "STATIC"
        return context

    def _value(self, name: str) -> Any:
        return next(v for v in (*self.session.get_inputs(), *self.session.get_outputs()) if v.name == name)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> str:
        return "INPUT" if any(i.name == name for i in self.session.get_inputs()) else "OUTPUT"

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else -1 for size in self._value(name).shape)

    def get_tensor_profile_shape(self, name: str, profile: int) -> tuple[tuple[int, ...], ...]:
        assert self.get_tensor_mode(name) == "INPUT", "outputs have no profiles"
        return tuple(map(tuple, self.head["profiles"][profile][name]))

    def get_tensor_dtype(self, name: str) -> str:
        return TYPES[self._value(name).type]

    def create_engine_inspector(self) -> Any:
        kind = "PluginV2" if self.major < 10 else "PluginV3"
        layers: list[Any] = [{"Name": "product", "LayerType": "gemm"}]
        for profile in range(len(self.head["profiles"])):
            suffix = f" [profile {profile}]" if profile else ""
            layers += [
                {"Name": f"{op}{i}{suffix}", "LayerType": kind, "PluginType": op}
                for op, count in self.head["plugins"].items()
                for i in range(count)
            ]
        return types.SimpleNamespace(get_engine_information=lambda form: json.dumps({"Layers": layers}))
