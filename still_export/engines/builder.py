"""One run of TensorRT's builder over a package for this machine's GPU, and checks of the engine.

Written for TensorRT 10 and later; builder_trt8.py and builder_rtx.py have what TensorRT 8.6 and TensorRT-RTX need instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from still_export.engines.builder_log import Progress, file_logger, progress_monitor
from still_export.package.archive import kernels_in
from still_export.package.folder import MODEL, Package
from still_export.runtime.trt_engine import (
    DECODE,
    DECODE_ROWS,
    GUESSES,
    PREFILL,
    TrtError,
    find_plugin_library,
    load_plugin_library,
)
from still_export.targets.target import BuildError
from still_export.targets.trt.options import TrtOptions
from still_graphs.states import StateTable

LOG, TIMING_CACHE = "build.log", "timing.cache"


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn the runner's refusal of a library into a build error."""
    try:
        yield
    except TrtError as error:
        raise BuildError(str(error)) from error


class EngineBuilder:
    """One run of TensorRT's builder over a package, logged in build.log."""

    def __init__(self, module: Any, package: Package, trt: TrtOptions, say: Progress) -> None:
        self.module, self.package, self.trt, self.say = module, package, trt, say
        self.errors: list[str] = []

    def __enter__(self) -> EngineBuilder:
        self.log = (self.package.path / LOG).open("w", encoding="utf-8")
        self.logger = file_logger(self.module, self.log, self.errors)
        return self

    def __exit__(self, *error: Any) -> None:
        self.log.close()

    def fail(self, what: str) -> BuildError:
        """An error with TensorRT's last messages."""
        reasons = "\n  ".join(self.errors[-5:]) or "TensorRT gave no reason"
        advice = ""
        if any("memory" in error.lower() for error in self.errors):
            advice = self._memory_advice()
        if any("could not find any implementation" in error.lower() for error in self.errors):
            joined = "merge_heads" in self.package.manifest["trt"].get("passes", {})
            settings = {"optimization-level": self.trt.optimization_level, "prefill-tokens": self.trt.prefill_tokens}
            settings |= {} if joined else {"batch": self.trt.batch}
            settings |= {"workspace": self.trt.workspace_mib} if self.trt.workspace_mib else {}
            named = ", ".join(f"--{name} (now {value})" for name, value in settings.items())
            advice += (
                "\nTensorRT found no kernels for a part of the model in these shapes. "
                f"Build without {TIMING_CACHE}, or with another value of {named}."
            )
            if joined:
                advice += " Or export again with --batch 2 or more: each part of the model then has two layouts to try."
        return BuildError(f"{what}:\n  {reasons}{advice}\nThe whole log: {self.package.path / LOG}")

    def _memory_advice(self) -> str:
        free, total = self.driver.memory()
        return (
            f"\n{free >> 20} of {total >> 20} MiB of device memory are free. Close other programs on this GPU, or build with a "
            f"smaller --batch (now {self.trt.batch}), --prefill-tokens (now {self.trt.prefill_tokens}) or --workspace."
        )

    def build(self, plugin: Path | None) -> list[dict[str, Any]]:
        """Build, check and write the engine; returns its manifest entries."""
        self._prepare(plugin)
        start = time.monotonic()
        plan = self._plan()
        seconds = time.monotonic() - start
        self._check_plugin_layers(plan)
        write_atomically(self.package.path / self.trt.engine, memoryview(plan))
        entry = {
            "file": self.trt.engine,
            "tensorrt": self.module.__version__,
            "size_bytes": plan.nbytes,
            "build_s": round(seconds, 1),
            "batch": self.trt.batch,
            "prefill_tokens": self.trt.prefill_tokens,
            "rows": self._rows(),
            "profiles": [name for name, *_ in self._calls()],
            "stripped": self.trt.strip_weights,
            **self._device(),
        }
        return [entry]

    def _prepare(self, plugin: Path | None) -> None:
        """Load the driver and the plugin library.

        Raises:
            BuildError: This GPU or TensorRT cannot build the package.
        """
        from still_export.runtime.cuda_driver import Driver

        self.driver = Driver()
        self._check_kernels(plugin)
        self.say("loading the plugin library")
        with _refusals():
            self.plugin = load_plugin_library(self.module, self.package.path, self.package.manifest, plugin)

    def _check_kernels(self, plugin: Path | None) -> None:
        """Raise if the library has no kernels of an op for this GPU, which TensorRT would report minutes later."""
        with _refusals():
            library = find_plugin_library(self.module, self.package.path, self.package.manifest, plugin)
        kernels, device = kernels_in(library) or {}, self.driver.architecture
        for op in self.package.manifest["plugin_layers"]:
            names = sorted(kernels.get(op, ()))
            if not any(runs_on(name, device) for name in names):
                raise BuildError(
                    f"the kernels of {library} for {op} are for {', '.join(names) or 'no GPU'}, this GPU is {self.driver.name}, "
                    f"sm_{device}. Export again with --arch {','.join((*names, f'sm_{device}'))}."
                )

    def _plan(self) -> Any:
        """The serialized engine; network and weights are freed on return."""
        cache = None  # defined first, so freed first: 8.6 crashes if it outlives builder and logger
        module = self.module
        self.say("starting TensorRT")
        builder = module.Builder(self.logger)
        network = builder.create_network(self._network_flags())
        parser = module.OnnxParser(network, self.logger)
        config = self._config(builder)
        cache = self._timing_cache(config)
        self.say("reading the graph")
        if not parser.parse_from_file(str(self.package.path / MODEL)):
            self.errors.extend(str(parser.get_error(i)) for i in range(parser.num_errors))
            raise self.fail(f"TensorRT {module.__version__} refused {self.package.path / MODEL}")
        for profile in self._profiles(builder, network):
            config.add_optimization_profile(profile)
        self._adjust(network)
        self.say("building the engine")
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise self.fail("TensorRT could not build the engine")
        if cache is not None:
            write_atomically(self.package.path / TIMING_CACHE, memoryview(config.get_timing_cache().serialize()))
        return plan

    def _device(self) -> dict[str, Any]:
        return {"gpu": self.driver.name, "archs": [f"sm_{self.driver.architecture}"]}

    def _network_flags(self) -> int:
        return 1 << int(self.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)

    def _config(self, builder: Any) -> Any:
        module, trt = self.module, self.trt
        config = builder.create_builder_config()
        flags = module.BuilderFlag
        if trt.strip_weights:
            if not hasattr(flags, "STRIP_PLAN"):
                raise BuildError(
                    f"TensorRT {module.__version__} cannot strip weights; it came with 10.0. Export without --strip-weights."
                )
            # Refitted with the same weights as built, so no optimization is lost.
            config.set_flag(flags.STRIP_PLAN)
            config.set_flag(flags.REFIT_IDENTICAL)
        if trt.version_compatible:
            config.set_flag(flags.VERSION_COMPATIBLE)
        if trt.workspace_mib:
            config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, trt.workspace_mib << 20)
        if hasattr(module, "IProgressMonitor"):  # since 9
            self.monitor = progress_monitor(module, self.say)
            config.progress_monitor = self.monitor
        config.profiling_verbosity = module.ProfilingVerbosity.DETAILED
        self._set_device(config)
        return config

    def _set_device(self, config: Any) -> None:
        """Settings for the GPU that runs the engine."""
        if self.package.manifest["model"]["dtype"] == "float32":
            config.clear_flag(self.module.BuilderFlag.TF32)  # it would round float32 to 10 bits
        config.builder_optimization_level = self.trt.optimization_level
        if self.trt.version_compatible:
            config.plugins_to_serialize = [str(self.plugin.resolve())]

    def _adjust(self, network: Any) -> None:
        """Change the parsed network, if its layers do not have the graph's types."""

    def _timing_cache(self, config: Any) -> Any:
        """Load the timings of an earlier build; those of another GPU or TensorRT are dropped."""
        path = self.package.path / TIMING_CACHE
        cache = config.create_timing_cache(path.read_bytes() if path.exists() else b"")
        if cache is None or not config.set_timing_cache(cache, False):
            self.say("the timing cache belongs to another machine: starting a new one")
            self.errors.clear()
            cache = config.create_timing_cache(b"")
            config.set_timing_cache(cache, False)
        return cache

    def _rows(self) -> dict[str, int]:
        """Most rows of growing states; at least one, because dimensions of length 0 crash some versions."""
        table = StateTable.of(self.package.manifest)
        return table.rows(table.capacity_tokens, least=1)

    def _calls(self) -> list[tuple[str, tuple[int, int, int], tuple[int, int, int]]]:
        """Profiles: name, then rows and tokens of a call, each as (least, optimal, largest)."""
        # In one profile of 1 to 8 rows, TensorRT 8.6 chose kernels for a single row that are wrong for more. So single rows have their own
        # profile, and the profile of more rows is tuned for the largest. Calls with guesses have one size and are replayed as a CUDA graph.
        batch, tokens = self.trt.batch, self.trt.prefill_tokens
        prefill, decode = (PREFILL, (1, 1, batch), (1, tokens, tokens)), (DECODE, (1, 1, 1), (1, 1, 1))
        rows = [(DECODE_ROWS, (2, batch, batch), (1, 1, 1))] if batch > 1 else []
        most = 1 + self.package.manifest.get("speculate", 0)
        guesses = [(GUESSES, (1, batch, batch), (most, most, most))] if most > 1 else []
        return [prefill, decode, *rows, *guesses]

    def _profiles(self, builder: Any, network: Any) -> Iterator[Any]:
        growths, most = StateTable.of(self.package.manifest).growths, self._rows()
        least = {name: rows if growths[name]["fixed"] else 1 for name, rows in most.items()}
        inputs = {"input_ids": ["batch", "tokens"], "new_tokens": ["batch"], "past_length": ["batch"]}
        inputs |= {"past_" + s["name"]: s["shape"] for s in self.package.manifest["states"]}
        for _, rows, tokens in self._calls():
            profile = builder.create_optimization_profile()
            for index in range(network.num_inputs):
                name = network.get_input(index).name
                shapes = [
                    tuple({"batch": b, "tokens": t, **sizes}.get(d, d) for d in inputs[name])
                    for b, t, sizes in zip(rows, tokens, (least, most, most), strict=True)
                ]
                profile.set_shape(name, *shapes)
            yield profile

    def _check_plugin_layers(self, plan: Any) -> None:
        """Raise unless every still node became a plugin layer, because the parser silently uses function bodies instead."""
        expected = self.package.manifest["plugin_layers"]
        if not expected:
            return
        runtime = self.module.Runtime(self.logger)
        if self.trt.version_compatible:
            runtime.engine_host_code_allowed = True
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise self.fail("the engine cannot be read back")
        found = engine.create_engine_inspector().get_engine_information(self.module.LayerInformationFormat.JSON)
        (self.package.path / "engine.json").write_text(found)
        counts = plugin_layers(found)
        for op, count in expected.items():
            if counts.get(op, 0) != count:
                raise BuildError(
                    f"{count} nodes of {op} became {counts.get(op, 0)} plugin layers; engine.json has all layers. "
                    "This plan would not compute the exported model, and was not written."
                )


def plugin_layers(inspected: str) -> dict[str, int]:
    """Plugin layers of the first profile by plugin type, from the engine inspector's JSON."""
    counts: dict[str, int] = {}
    for layer in json.loads(inspected, strict=False)["Layers"]:
        # The text has raw control characters. Layers of further profiles have the profile's number in their names.
        if isinstance(layer, dict) and "PluginType" in layer and "[profile " not in layer["Name"]:
            counts[layer["PluginType"]] = counts.get(layer["PluginType"], 0) + 1
    return counts


def runs_on(name: str, device: int) -> bool:
    """Whether kernels for `name` run on a GPU of compute capability `device`, 86 for 8.6; same rule as plugins/core/archive.cpp."""
    compiled = int(name.removeprefix("sm_"))
    if compiled >= 90:  # compiled for exactly this one
        return compiled == device
    return compiled // 10 == device // 10 and compiled <= device


def write_atomically(path: Path, content: Any) -> None:
    staging = path.with_name(f".{path.name}.part")
    try:
        with staging.open("wb") as file:
            file.write(content)
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)
