"""TensorRT for tests without it: the Python API of one version, and no more; engines run the package's graph on ONNX Runtime.

A plan holds the lowered graph with function bodies in the place of its plugin nodes, so builds, runs and proofs go their whole way with
true numbers. `install` puts it and a stand-in for the CUDA driver where the code looks for them.
"""

from __future__ import annotations

import ctypes
import json
import struct
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from still_graphs.opset import DOMAIN, OPS
from still_graphs.passes.attach_functions import attach_functions
from still_graphs.passes.walk import Rewriter, attribute, drop_attribute, set_opset, value_names
from tests.still_export.fake_cuda import HostDriver

LIBRARY = "still plugins 1"
"""Content of a plugin library, with the version of its plugins."""

NUMPY = {"float": "f4", "float16": "f2", "int32": "i4"}
MAGIC = b"FAKEPLAN"


def restore_bodies(model: onnx.ModelProto) -> None:
    """Undo what the lowering did to still nodes and to opset 23's spelling, and give the nodes their bodies, in place."""
    rewriter = Rewriter(model.graph, value_names(model.graph))
    for node in model.graph.node:
        if node.op_type.startswith("Reduce") and attribute(node, "axes") is not None:
            node.input.append(rewriter.constant(attribute(node, "axes"), "int64"))
            drop_attribute(node, "axes")
        if node.op_type == "Split" and len(node.input) < 2:
            node.attribute.append(helper.make_attribute("num_outputs", len(node.output)))
        if node.domain == DOMAIN:
            _restore(node, rewriter)
        rewriter.nodes.append(node)
    rewriter.finish()
    set_opset(model, "", 23)
    model.ir_version = 10
    attach_functions(model)


def _restore(node: onnx.NodeProto, rewriter: Rewriter) -> None:
    spec = OPS[node.op_type]
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
    node.output[:] = [
        "" if n.replace("present_", "past_", 1) in missing else next(results) for n in spec.output_names()
    ]
    for name in ("plugin_namespace", "plugin_version", "absent_inputs", "activation_type"):
        drop_attribute(node, name)


class HostMemory(bytes):
    """IHostMemory."""

    @property
    def nbytes(self) -> int:
        return len(self)


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
            self.create_execution_context = lambda strategy: NewContext(self)

    def get_tensor_dtype(self, name: str) -> str:
        kind = next(o.type for o in self.session.get_outputs() if o.name == name)
        return {"tensor(float)": "DataType.FLOAT", "tensor(float16)": "DataType.HALF"}[kind]

    def create_engine_inspector(self) -> Any:
        kind = "PluginV2" if self.major < 10 else "PluginV3"
        layers: list[Any] = [{"Name": "product", "LayerType": "gemm"}]
        for suffix in ("", " [profile 1]"):
            layers += [
                {"Name": f"{op}{i}{suffix}", "LayerType": kind, "PluginType": op}
                for op, count in self.head["plugins"].items()
                for i in range(count)
            ]
        return types.SimpleNamespace(get_engine_information=lambda form: json.dumps({"Layers": layers}))


class Config:
    """IBuilderConfig: takes what the version knows, nothing else."""

    def __init__(self, module: FakeTensorRT) -> None:
        known = {"builder_optimization_level", "profiling_verbosity", "plugins_to_serialize"}
        known |= {"progress_monitor"} if module.major >= 10 else set()
        self.__dict__.update(
            _known=known, module=module, flags={"TF32"}, profiles=[], pools={}, sources=None, cache=None
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._known:
            raise AttributeError(f"IBuilderConfig has no {name}")
        self.__dict__[name] = value

    def set_flag(self, flag: str) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: str) -> None:
        self.flags.discard(flag)

    def set_memory_pool_limit(self, pool: str, size: int) -> None:
        self.pools[pool] = size

    def set_tactic_sources(self, sources: int) -> bool:
        self.__dict__["sources"] = sources
        return True

    def create_timing_cache(self, content: bytes) -> Any:
        mine = content in (b"", f"timings {self.module.__version__}".encode())
        return types.SimpleNamespace(content=content, mine=mine)

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        self.__dict__["cache"] = cache if cache.mine else None
        return cache.mine

    def get_timing_cache(self) -> Any:
        content = HostMemory(f"timings {self.module.__version__}".encode())
        return types.SimpleNamespace(serialize=lambda: content)

    def add_optimization_profile(self, profile: Any) -> int:
        self.profiles.append(profile.shapes)
        return len(self.profiles) - 1


class Layer:
    """One layer of a parsed network, with the type that it was held to."""

    def __init__(self, node: onnx.NodeProto, typed: bool) -> None:
        self.node, self.num_outputs = node, len(node.output)
        self.type = {"Constant": "CONSTANT", "Cast": "CAST", DOMAIN: "PLUGIN_V2"}.get(
            node.domain or node.op_type, "OTHER"
        )
        if typed:
            self.precision, self.types = None, {}

    def get_output(self, index: int) -> Any:
        return types.SimpleNamespace(name=self.node.output[index])

    def set_output_type(self, index: int, dtype: str) -> None:
        self.types[index] = dtype


class Parser:
    """OnnxParser: plugin nodes need a registered creator; a function would silently take its place."""

    def __init__(self, network: Any, logger: Any) -> None:
        self.network, self.errors = network, []

    @property
    def num_errors(self) -> int:
        return len(self.errors)

    def get_error(self, index: int) -> str:
        return self.errors[index]

    def parse_from_file(self, path: str) -> bool:
        module, model = self.network.module, onnx.load(path)
        assert module.major >= 10 or next(o.version for o in model.opset_import if not o.domain) <= 17
        for node in model.graph.node:
            if node.domain != DOMAIN or any(f.name == node.op_type for f in model.functions):
                continue
            key = tuple(attribute(node, n) for n in ("plugin_namespace", "plugin_version"))
            if (node.op_type, *key) not in module.creators:
                self.errors.append(f"no creator for {node.op_type}, namespace and version {key}")
        self.network.take(model)
        return not self.errors


class FakeTensorRT(types.ModuleType):
    """The module `tensorrt` of one version; `configs` and `engines` are what was made, `loaded` the plugin libraries."""

    def __init__(self, version: str) -> None:
        super().__init__("tensorrt")
        self.__version__, self.major = version, int(version.split(".")[0])
        major = self.major
        self.configs: list[Config] = []
        self.engines: list[Engine] = []
        self.networks: list[Any] = []
        self.loaded: list[str] = []
        self.creators: set[tuple[str, str, str]] = set()
        self.build_fails = ""
        flags = "TF32 VERSION_COMPATIBLE REFIT" + (" FP16 OBEY_PRECISION_CONSTRAINTS" if major < 11 else "")
        self.BuilderFlag = _names(flags + (" STRIP_PLAN REFIT_IDENTICAL" if major >= 10 else ""))
        creation = {"EXPLICIT_BATCH": 0} if major < 11 else {}
        self.NetworkDefinitionCreationFlag = types.SimpleNamespace(
            **creation, **({"STRONGLY_TYPED": 1} if major >= 10 else {})
        )
        self.MemoryPoolType, self.ProfilingVerbosity = _names("WORKSPACE"), _names("DETAILED")
        self.LayerType = _names("CONSTANT CAST PLUGIN_V2 SHAPE IDENTITY")
        self.LayerInformationFormat = _names("JSON")
        self.float32, self.float16 = "float32", "float16"
        self.ILogger = type("ILogger", (), {})
        self.Logger = type("Logger", (), {"ERROR": 1, "__init__": lambda self, severity: None})
        self.OnnxParser = Parser
        if major >= 10:
            self.IProgressMonitor = type("IProgressMonitor", (), {})
            self.ExecutionContextAllocationStrategy = _names("USER_MANAGED")
            self.Refitter = lambda engine, logger: types.SimpleNamespace(refit_cuda_engine=lambda: _refit(engine))
            self.OnnxParserRefitter = lambda refitter, logger: types.SimpleNamespace(
                refit_from_file=lambda path: bool(onnx.load(path).graph.initializer), num_errors=0
            )
        shown = {} if major >= 11 else {"plugin_creator_list": None}
        self.registry: Any = type("IPluginRegistry", (), {})()
        for name in (*shown, *(["all_creators"] if major >= 10 else [])):
            setattr(type(self.registry), name, property(lambda _: self.creator_list()))
        self.registry.load_library = self.load_library if major >= 10 else lambda path: None
        self.get_plugin_registry = lambda: self.registry

    def creator_list(self) -> list[Any]:
        return [
            types.SimpleNamespace(name=n, plugin_namespace=s, plugin_version=v) for n, s, v in sorted(self.creators)
        ]

    def load_library(self, path: str) -> Any:
        """Refuses what is no library, and one whose plugins are registered."""
        content = Path(path).read_text()
        added = {(name, DOMAIN, content[-1:]) for name in OPS}
        if not content.startswith("still plugins") or added & self.creators:
            return None
        self.creators |= added
        self.loaded.append(Path(path).name)
        return object()

    def open_library(self, path: str) -> None:
        """ctypes.CDLL."""
        if self.load_library(path) is None:
            raise OSError(f"{path}: file too short")

    def Runtime(self, logger: Any) -> Any:
        runtime = types.SimpleNamespace(engine_host_code_allowed=False)

        def deserialize(plan: Any) -> Engine | None:
            content = bytes(plan)
            if not content.startswith(MAGIC):
                return None
            (size,) = struct.unpack_from("<Q", content, len(MAGIC))
            begin = len(MAGIC) + 8
            head = json.loads(content[begin : begin + size])
            allowed = runtime.engine_host_code_allowed if head["compatible"] else head["version"] == self.__version__
            plugins = head["serialized"] if head["compatible"] else [name for name, _, _ in self.creators]
            if not allowed or (head["plugins"] and not plugins):
                return None
            self.engines.append(Engine(self.major, head, content[begin + size :]))
            return self.engines[-1]

        runtime.deserialize_cuda_engine = deserialize
        return runtime

    def Builder(self, logger: Any) -> Any:
        def network(flags: int) -> Any:
            assert flags == (1 if self.major < 10 else 2), "explicit batch before 10, strongly typed since"
            self.networks.append(Network(self))
            return self.networks[-1]

        def config() -> Config:
            self.configs.append(Config(self))
            return self.configs[-1]

        return types.SimpleNamespace(
            create_network=network,
            create_builder_config=config,
            create_optimization_profile=Profile,
            build_serialized_network=lambda network, config: self._build(network, config, logger),
        )

    def _build(self, network: Network, config: Config, logger: Any) -> HostMemory | None:
        if self.build_fails:
            logger.log("Severity.ERROR", self.build_fails)
            return None
        assert config.profiles and all(set(p) == {i.name for i in network.model.graph.input} for p in config.profiles)
        monitor = getattr(config, "progress_monitor", None)
        if monitor is not None:
            monitor.phase_start("tactics", None, 2)
            assert monitor.step_complete("tactics", 0)
            monitor.phase_finish("tactics")
        counts: dict[str, int] = {}
        for node in network.model.graph.node:
            if node.domain == DOMAIN and not network.model.functions:
                counts[node.op_type] = counts.get(node.op_type, 0) + 1
        head = {
            "version": self.__version__,
            "compatible": "VERSION_COMPATIBLE" in config.flags,
            "serialized": getattr(config, "plugins_to_serialize", []),
            "stripped": "STRIP_PLAN" in config.flags,
            "profiles": config.profiles,
            "plugins": counts,
        }
        if not network.model.functions:
            restore_bodies(network.model)
        text = json.dumps(head).encode()
        return HostMemory(MAGIC + struct.pack("<Q", len(text)) + text + network.model.SerializeToString())


class Network:
    """INetworkDefinition."""

    def __init__(self, module: FakeTensorRT) -> None:
        self.module = module

    def take(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.layers = [Layer(node, self.module.major < 11) for node in model.graph.node]
        self.num_layers, self.num_inputs = len(self.layers), len(model.graph.input)
        self.num_outputs = len(model.graph.output)
        self.outputs = [types.SimpleNamespace(name=o.name) for o in model.graph.output]

    def get_layer(self, index: int) -> Layer:
        return self.layers[index]

    def get_input(self, index: int) -> Any:
        return self.model.graph.input[index]

    def get_output(self, index: int) -> Any:
        return self.outputs[index]


class Profile:
    """IOptimizationProfile."""

    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, least: tuple[int, ...], best: tuple[int, ...], most: tuple[int, ...]) -> None:
        assert all(0 < a <= b <= c for a, b, c in zip(least, best, most, strict=True)), (name, least, best, most)
        self.shapes[name] = (least, best, most)


def _refit(engine: Engine) -> bool:
    engine.refitted = True
    return True


def _names(names: str) -> Any:
    return types.SimpleNamespace(**{name: name for name in names.split()})


def install(patch: pytest.MonkeyPatch, version: str = "10.3.0") -> FakeTensorRT:
    """TensorRT `version` on a GPU of capability 9.0; the module that `import tensorrt` gives."""
    module = FakeTensorRT(version)
    HostDriver.blocks.clear()
    patch.setitem(__import__("sys").modules, "tensorrt", module)
    for place in ("cuda_driver", "trt_engine"):
        patch.setattr(f"still_export.runners.{place}.Driver", HostDriver)
    patch.setattr("still_export.runners.trt_engine.ctypes.CDLL", module.open_library)
    return module


def write_libraries(folder: Path) -> dict[str, str]:
    """Stand-ins for the plugin libraries of every generation; their names by generation."""
    names = {major: f"libstill_tensorrt{major}.so" for major in ("8", "10", "11")}
    for name in names.values():
        for file in (folder / name, folder / name.replace(".so", "_static.so")):
            file.write_text(LIBRARY)
    return names


def flags_of(module: FakeTensorRT) -> Iterator[set[str]]:
    """The flags of every build."""
    return (config.flags for config in module.configs)
