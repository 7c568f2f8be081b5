"""TensorRT for tests without it: the Python API of one version, and no more; engines run the package's graph on ONNX Runtime.

A plan holds the lowered graph with function bodies in the place of its plugin nodes, so builds, runs and proofs go their whole way with
true numbers. `install` puts it and a stand-in for the CUDA driver where the code looks for them.
"""

from __future__ import annotations

import ctypes
import json
import struct
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx
import pytest

from still_export.package.archive import MAGIC as ARCHIVE
from still_graphs.ops import DOMAIN, OPS
from tests.still_export.fake_cuda import HostDriver
from tests.still_export.fake_engine import Engine, restore_bodies
from tests.still_graphs.protos import attribute


def library_text(version: str = "1", archs: Iterable[str] = ("sm_90",)) -> str:
    """Content of a plugin library, with its archive's index and, last, the version of its plugins."""
    index = [{"op": f"{DOMAIN}::{name}", "variants": [{"arch": arch} for arch in archs]} for name in OPS]
    text = json.dumps({"indexes": index})
    text += " " * (-len(text) % 256)  # so that its length is text too
    return f"still plugins {ARCHIVE.decode()}{struct.pack('<Q', len(text)).decode()}{text} {version}"


MAGIC = b"FAKEPLAN"


class HostMemory(bytes):
    """IHostMemory."""

    @property
    def nbytes(self) -> int:
        return len(self)


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
        self.LayerInformationFormat, self.TensorIOMode = _names("JSON"), _names("INPUT OUTPUT")
        self.nptype = {"DataType.FLOAT": "f4", "DataType.HALF": "f2", "DataType.INT32": "i4"}.__getitem__
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
        patch.setattr(f"still_export.runtime.{place}.Driver", HostDriver)
    real = ctypes.CDLL

    def open_library(path: Any, *arguments: Any, **options: Any) -> Any:
        """This process and the system's libraries are what they are."""
        mine = path is not None and Path(path).name.startswith("libstill_")
        return module.open_library(path) if mine else real(path, *arguments, **options)

    patch.setattr("still_export.runtime.trt_engine.ctypes.CDLL", open_library)
    return module


def deploy(patch: pytest.MonkeyPatch, version: str) -> FakeTensorRT:
    """The same, where lowering writes stand-ins for the plugin libraries and engines are built."""
    written = "still_export.targets.trt.package._write_plugins"
    patch.setattr(written, lambda graph, target, *given: write_libraries(target))
    patch.setattr("still_export.engines.build.has_gpu", lambda: True)
    return install(patch, version)


def write_libraries(folder: Path, archs: Iterable[str] = ("sm_90",)) -> dict[str, str]:
    """Stand-ins for the plugin libraries of every generation; their names by generation."""
    names = {major: f"libstill_tensorrt{major}.so" for major in ("8", "10", "11")}
    for name in names.values():
        for file in (folder / name, folder / name.replace(".so", "_static.so")):
            file.write_text(library_text(archs=archs))
    return names
