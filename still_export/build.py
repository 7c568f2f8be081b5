"""The build verb: TensorRT and TensorRT-RTX engines of a package."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from still_export.errors import PackageError, StillExportError
from still_export.package import MANIFEST, MODEL, Package, open_package, write_manifest
from still_export.trt_options import GENERATED, TrtOptions

MODULES = {"trt": "tensorrt", "trt-rtx": "tensorrt_rtx_bindings"}
LOG, TIMING_CACHE = "build.log", "timing.cache"
Progress = Callable[[str], None]


class BuildError(StillExportError):
    """TensorRT is missing, refused the graph, or built an engine that is not what was asked for."""


class NoBuilderError(BuildError):
    """This machine cannot build the engines; the package is complete and another machine can."""


@dataclass(frozen=True)
class BuildOptions:
    """Overrides of what the export recorded; None keeps it.

    Args:
        plugin: Plugin library to load in the place of the package's.
        batch: Largest batch.
        prefill_tokens: Tokens of one prefill call.
        workspace_mib: Limit of the workspace.
    """

    plugin: Path | None = None
    batch: int | None = None
    prefill_tokens: int | None = None
    workspace_mib: int | None = None


def build_engines(
    package: Package, options: BuildOptions | None = None, progress: Progress | None = None
) -> list[Path]:
    """Build the engines of a package, in place, and record them in its manifest.

    Args:
        package: Written by `export_trt`.
        options: Overrides.
        progress: Told each step.

    Returns:
        The engine files.

    Raises:
        NoBuilderError: No TensorRT or no GPU here.
        BuildError: The graph was refused, or a still node did not become a plugin layer; build.log has TensorRT's words.
    """
    options, say = options or BuildOptions(), progress or (lambda step: None)
    manifest = package.manifest
    if manifest.get("target") not in MODULES:
        raise PackageError(
            f"{package.path} is a package for {manifest.get('target')}, which has no engines. "
            "Export with --to trt or --to trt-rtx."
        )
    names = ("batch", "prefill_tokens", "workspace_mib")
    changes = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    trt = TrtOptions.from_manifest(manifest, **changes)
    module = load_tensorrt(trt.target, package.path)
    with EngineBuilder(module, package, trt, say) as builder:
        entries = builder.build(options.plugin)
    content = {k: v for k, v in manifest.items() if k not in GENERATED}
    content.update(engines=entries, prefill_tokens=trt.prefill_tokens)
    write_manifest(package.path, content)
    return [package.path / entry["file"] for entry in entries]


def load_tensorrt(target: str, package: Path) -> Any:
    """TensorRT's Python module.

    Raises:
        NoBuilderError: It is not installed, or it needs a GPU and there is none.
    """
    name = MODULES[target]
    again = f"Run on a machine that has it: still-export build {package}"
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise NoBuilderError(f"the Python module {name} is not installed ({error}). {again}") from error
    if target == "trt" and not has_gpu():
        raise NoBuilderError(f"no CUDA device: TensorRT builds engines on the GPU that runs them. {again}")
    return module


def has_gpu() -> bool:
    """True when the CUDA driver finds a device."""
    from still_export.runners.cuda_driver import CudaError, Driver

    try:
        return Driver.device_count() > 0
    except CudaError:
        return False


def load_plugin(module: Any, package: Package, plugin: Path | None) -> Path:
    """Load the plugin library for this TensorRT.

    Raises:
        BuildError: The package has none for this version, or the file is missing.
    """
    from still_export.runners.tensorrt import TrtError, load_plugin_library

    try:
        return load_plugin_library(module, package.path, package.manifest, plugin)
    except TrtError as error:
        raise BuildError(str(error)) from error


class EngineBuilder:
    """One run of TensorRT's builder over a package; keeps its log in build.log."""

    def __init__(self, module: Any, package: Package, trt: TrtOptions, say: Progress) -> None:
        self.module, self.package, self.trt, self.say = module, package, trt, say
        self.major = int(module.__version__.split(".")[0]) if trt.target == "trt" else 11
        self.errors: list[str] = []

    def __enter__(self) -> EngineBuilder:
        self.log = (self.package.path / LOG).open("w", encoding="utf-8")
        self.logger = self._make_logger()
        return self

    def __exit__(self, *error: Any) -> None:
        self.log.close()

    def _make_logger(self) -> Any:
        module, log, errors = self.module, self.log, self.errors

        class FileLogger(module.ILogger):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                module.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                name = str(severity).rsplit(".", 1)[-1]
                if not log.closed and name != "VERBOSE":
                    log.write(f"{time.strftime('%H:%M:%S')} {name:8} {message}\n")
                    log.flush()
                if name in ("ERROR", "INTERNAL_ERROR"):
                    errors.append(message)

        return FileLogger()

    def fail(self, what: str) -> BuildError:
        """An error that carries TensorRT's last words."""
        said = "\n  ".join(self.errors[-5:]) or "TensorRT gave no reason"
        return BuildError(f"{what}:\n  {said}\nThe whole log: {self.package.path / LOG}")

    def build(self, plugin: Path | None) -> list[dict[str, Any]]:
        """Build, check and write the engine; its manifest entry."""
        module, target = self.module, self.trt.target
        if target == "trt":
            self.say("loading the plugin library")
            load_plugin(module, self.package, plugin)
        self.say("starting TensorRT")
        builder = module.Builder(self.logger)
        network = builder.create_network(self._network_flags())
        parser = module.OnnxParser(network, self.logger)
        self.say("reading the graph")
        if not parser.parse_from_file(str(self.package.path / MODEL)):
            self.errors.extend(str(parser.get_error(i)) for i in range(parser.num_errors))
            raise self.fail(f"TensorRT {module.__version__} refused {self.package.path / MODEL}")
        if target == "trt" and self.major < 10:
            self._fix_precisions(network)
        config = self._config(builder, network)
        start = time.monotonic()
        self.say("building the engine")
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise self.fail("TensorRT could not build the engine")
        seconds = time.monotonic() - start
        name = "engine.plan" if target == "trt" else "engine-rtx.plan"
        self._check_plugin_layers(plan)
        write_atomically(self.package.path / name, memoryview(plan))
        if target == "trt":
            write_atomically(self.package.path / TIMING_CACHE, memoryview(config.get_timing_cache().serialize()))
        entry = {
            "file": name,
            "tensorrt": module.__version__,
            "size_bytes": plan.nbytes,
            "build_s": round(seconds, 1),
            "batch": self.trt.batch,
            "prefill_tokens": self.trt.prefill_tokens,
            "slots": self._slots(),
            "profiles": ["prefill", "decode"],
            "stripped": self.trt.strip_weights,
            **self._device(),
        }
        return [entry]

    def _device(self) -> dict[str, Any]:
        if self.trt.target == "trt-rtx":
            return {"archs": list(self.trt.architectures)}
        from still_export.runners.cuda_driver import Driver

        driver = Driver()
        return {"gpu": driver.name, "archs": [f"sm_{driver.architecture}"]}

    def _network_flags(self) -> int:
        flags = self.module.NetworkDefinitionCreationFlag
        if self.major < 10:
            return 1 << int(flags.EXPLICIT_BATCH)
        return 1 << int(flags.STRONGLY_TYPED)

    def _config(self, builder: Any, network: Any) -> Any:
        module, trt = self.module, self.trt
        config = builder.create_builder_config()
        flags = module.BuilderFlag
        if trt.target == "trt" and self.major < 10:
            if self.package.manifest["model"]["dtype"] == "float16":
                config.set_flag(flags.FP16)
                config.set_flag(flags.OBEY_PRECISION_CONSTRAINTS)
            config.builder_optimization_level = self.trt.optimization_level
            config.set_tactic_sources(0)  # cuBLAS and cuDNN bring nothing to these graphs, and may be absent
        if trt.version_compatible:
            config.set_flag(flags.VERSION_COMPATIBLE)
        if trt.strip_weights:
            if not hasattr(flags, "STRIP_PLAN"):
                raise BuildError(f"TensorRT {module.__version__} cannot strip weights; it came with 10.0.")
            config.set_flag(flags.STRIP_PLAN)
        if trt.workspace_mib:
            config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, trt.workspace_mib << 20)
        config.profiling_verbosity = module.ProfilingVerbosity.DETAILED
        if trt.target == "trt-rtx":
            config.num_compute_capabilities = len(trt.architectures)
            for index, arch in enumerate(trt.architectures):
                name = arch.upper().replace("_", "")
                if not hasattr(module.ComputeCapability, name):
                    known = [n for n in dir(module.ComputeCapability) if n.startswith("SM")]
                    raise BuildError(
                        f"{arch} is no architecture of TensorRT-RTX {module.__version__}: {', '.join(known)}."
                    )
                config.set_compute_capability(getattr(module.ComputeCapability, name), index)
        cache = self.package.path / TIMING_CACHE
        if trt.target == "trt":
            config.set_timing_cache(config.create_timing_cache(cache.read_bytes() if cache.exists() else b""), False)
        for profile in self._profiles(builder, network):
            config.add_optimization_profile(profile)
        return config

    def _slots(self) -> int:
        """Most salient slots of a layer; at least one, because dimensions of length 0 crash some versions."""
        capacity = self.package.manifest["capacity"]
        chunks = -(-capacity["capacity_tokens"] // capacity["chunk_size"])
        return max(1, capacity["salient_per_chunk"] * max(0, chunks - 2))

    def _profiles(self, builder: Any, network: Any) -> Iterator[Any]:
        """Prefill: up to `prefill_tokens` tokens; decode: one token, for which kernels are chosen of their own."""
        batch, tokens = self.trt.batch, self.trt.prefill_tokens
        sizes = {"slots": self._slots(), "capacity": self.package.manifest["capacity"]["capacity_tokens"]}
        names = {"past_" + s["name"]: s["shape"] for s in self.package.manifest["states"]}
        for low, best, high in ((1, tokens, tokens), (1, 1, 1)):
            profile = builder.create_optimization_profile()
            for index in range(network.num_inputs):
                tensor = network.get_input(index)
                if tensor.name == "input_ids":
                    shapes: list[tuple[int, ...]] = [(1, low), (1, best), (batch, high)]
                elif tensor.name in ("new_tokens", "past_length"):
                    shapes = [(1,), (1,), (batch,)]
                else:
                    least = {name: 1 for name in sizes}
                    shapes = [
                        tuple({"batch": rows, **some}.get(d, d) for d in names[tensor.name])
                        for rows, some in ((1, least), (1, sizes), (batch, sizes))
                    ]
                profile.set_shape(tensor.name, *shapes)
            yield profile

    def _fix_precisions(self, network: Any) -> None:
        """Hold every layer to the types that the graph says: before 10 they are hints, and norms would run in half precision.

        The parsed network does not know the types of its inner tensors, so the package lists those of the graph.
        """
        module, types = self.module, self.package.manifest["value_types"]
        kinds = {"float32": module.float32, "float16": module.float16}
        free = {getattr(module.LayerType, n) for n in ("CONSTANT", "CAST", "PLUGIN_V2", "SHAPE", "IDENTITY")}
        for index in range(network.num_layers):
            layer = network.get_layer(index)
            names = [layer.get_output(i).name for i in range(layer.num_outputs)]
            if layer.type in free or not names or any(types.get(name) not in kinds for name in names):
                continue
            layer.precision = kinds[types[names[0]]]
            for i, name in enumerate(names):
                layer.set_output_type(i, kinds[types[name]])
        for index in range(network.num_outputs):
            output = network.get_output(index)
            if types.get(output.name) in kinds:
                output.dtype = kinds[types[output.name]]

    def _check_plugin_layers(self, plan: Any) -> None:
        """Raise unless every still node became a plugin layer: the parser would take a function in its place, silently."""
        wanted = self.package.manifest["plugin_layers"]
        if not wanted:
            return
        engine = self.module.Runtime(self.logger).deserialize_cuda_engine(plan)
        if engine is None:
            raise self.fail("the engine cannot be read back")
        found = engine.create_engine_inspector().get_engine_information(self.module.LayerInformationFormat.JSON)
        (self.package.path / "engine.json").write_text(found)
        counts = plugin_layers(found)
        for op, count in wanted.items():
            if counts.get(op, 0) != count:
                raise BuildError(
                    f"{count} nodes of {op} became {counts.get(op, 0)} plugin layers; engine.json has all layers. "
                    "This plan would not compute what was exported, and was not written."
                )


def plugin_layers(inspected: str) -> dict[str, int]:
    """Plugin layers by plugin type of the first profile, from the engine inspector's JSON."""
    counts: dict[str, int] = {}
    for layer in json.loads(inspected, strict=False)["Layers"]:
        # The text holds raw control characters. Layers of further profiles carry the profile's number in their names.
        if isinstance(layer, dict) and "PluginType" in layer and "[profile " not in layer["Name"]:
            counts[layer["PluginType"]] = counts.get(layer["PluginType"], 0) + 1
    return counts


def write_atomically(path: Path, content: Any) -> None:
    """Write a file whole or not at all."""
    staging = path.with_name(f".{path.name}.part")
    try:
        with staging.open("wb") as file:
            file.write(content)
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)


def reopen(path: Path) -> Package:
    """The package at `path`, hashes unchecked: a build reads the graph, and TensorRT checks it."""
    if not (path / MANIFEST).is_file():
        raise PackageError(f"{path} has no {MANIFEST}: it is no exported package.")
    return open_package(path, check_hashes=False)
