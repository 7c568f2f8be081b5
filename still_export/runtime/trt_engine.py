"""A package's TensorRT engine, opened for this machine: plugin library, plan, weights, execution contexts. No torch.

Exports copy this file into the package, for run_trt.py.
"""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any

import numpy as np

from still_export.package.archive import kernels_in
from still_export.package.checked import read_manifest
from still_export.package.external import listed_weights
from still_export.package.files import check_hash
from still_export.package.trust import UNTRUSTED, native_file
from still_export.runtime.cuda_driver import Buffer, CudaError, Driver
from still_export.runtime.sampling import RunError

PREFILL, DECODE, DECODE_ROWS, GUESSES = "prefill", "decode", "decode rows", "guesses"
"""Profiles of an engine, each with a context: several tokens; one token of one sequence; one token of several sequences; one token and all
guesses after it."""


class TrtError(RunError):
    """The engine cannot run here, or not this request; the message says why and what to do."""


def import_tensorrt(name: str = "tensorrt") -> Any:
    """TensorRT's Python module, or that of TensorRT for RTX.

    Raises:
        ImportError: It is not installed; a folder of that name on the path is not it.
    """
    module = importlib.import_module(name)
    if not hasattr(module, "__version__"):
        raise ImportError(f"a folder of that name lies on the path: {', '.join(module.__path__)}")
    return module


def find_plugin_library(module: Any, folder: Path, manifest: dict[str, Any], plugin: Path | None = None) -> Path:
    """The library whose plugins the package's engines have.

    Args:
        module: TensorRT's Python module.
        folder: The package.
        manifest: Its manifest.
        plugin: Library to use instead of the package's.

    Returns:
        The library; before TensorRT 10 the variant that registers itself.

    Raises:
        TrtError: No library for this TensorRT, the file is missing, or none of still-export's.
    """
    major = module.__version__.split(".")[0]
    named = plugin  # given by the user, who is responsible
    if plugin is None:
        libraries = manifest.get("plugins", {})
        if major not in libraries:
            raise TrtError(
                f"{folder} has no plugin library for TensorRT {module.__version__}, only for {', '.join(libraries) or 'none'}. "
                "Export again with --tensorrt-include FOLDER of that version, or name a library with --plugin."
            )
        plugin = folder / libraries[major]
    elif plugin.is_file() and kernels_in(plugin) is None:
        raise TrtError(
            f"{plugin} is no plugin library of still-export. Leave --plugin away, or name the libstill_tensorrt{major}.so of an export."
        )
    if int(major) < 10:
        # 8.6.0's registry cannot load libraries (8.6.1's can); the variant that registers itself works with both.
        plugin = plugin.with_name(f"{plugin.stem.removesuffix('_static')}_static.so")
    if not plugin.is_file():
        raise TrtError(f"the plugin library {plugin} is missing (searched there only). Name it with --plugin FILE.")
    if named is None and native_file(folder, manifest, plugin.name) is None:
        raise TrtError(f"the plugin library {plugin} {UNTRUSTED}.")
    return plugin


def load_plugin_library(module: Any, folder: Path, manifest: dict[str, Any], plugin: Path | None = None) -> Path:
    """Register the package's plugins with TensorRT; arguments and result: see `find_plugin_library`.

    Raises:
        TrtError: As there; TensorRT refuses the library, or it has other plugins.
    """
    major = module.__version__.split(".")[0]
    plugin = find_plugin_library(module, folder, manifest, plugin)
    registry, refused = module.get_plugin_registry(), f"TensorRT {module.__version__} cannot load {plugin}"
    ops = manifest.get("plugin_layers", {})
    if not set(ops) <= set(_versions(registry)):  # TensorRT refuses to load what is registered
        try:
            if int(major) < 10:
                ctypes.CDLL(str(plugin.resolve()))
            elif registry.load_library(str(plugin.resolve())) is None:
                raise TrtError(
                    f"{refused}; it was built for another version. Export again, or name a library with --plugin."
                )
        except (OSError, RuntimeError) as error:
            raise TrtError(f"{refused}: {error}. It is damaged, or built for another version or processor.") from error
    versions = _versions(registry)
    for name in ops:
        version = str(manifest["ops"][name])
        if name not in versions:
            raise TrtError(
                f"{refused}: it registered no plugin {name}. It is of another version. Export again, or name another with --plugin."
            )
        if version not in versions[name]:
            raise TrtError(
                f"{plugin} has version {', '.join(sorted(versions[name]))} of the plugin {name}, the package needs version {version}. "
                "Use the package's own library, or export again with this one's still-export."
            )
    return plugin


def _versions(registry: Any) -> dict[str, set[str]]:
    """Versions of the registered plugins by name."""
    found: dict[str, set[str]] = {}
    for creator in registry.all_creators if hasattr(registry, "all_creators") else registry.plugin_creator_list:
        found.setdefault(creator.name, set()).add(creator.plugin_version)
    return found


class TrtEngine:
    """A package's engine with an execution context for each profile.

    Args:
        folder: The package.
        plugin: Plugin library to use instead of the package's.
        device: CUDA device.

    Raises:
        TrtError: It cannot run here.
    """

    def __init__(self, folder: Path, plugin: Path | None = None, device: int = 0) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.again = f"Build it again here: still-export build {self.folder}"
        if not self.manifest.get("engines"):
            raise TrtError(
                f"{self.folder} has no engine yet. Build it on this machine: still-export build {self.folder}"
            )
        self.entry: dict[str, Any] = self.manifest["engines"][0]
        try:
            self.module = tensorrt = import_tensorrt()
        except ImportError as error:
            raise TrtError(
                f"the Python module tensorrt is not installed ({error}). Install version {self.entry['tensorrt']}."
            ) from error
        try:
            self.driver = Driver(device)
        except CudaError as error:
            raise TrtError(str(error)) from error
        self._check_host()
        if not self.compatible:  # a version-compatible plan includes the library
            load_plugin_library(tensorrt, self.folder, self.manifest, plugin)
        self.logger = tensorrt.Logger(tensorrt.Logger.ERROR)
        self.runtime = tensorrt.Runtime(self.logger)
        self.engine = self._read()
        if self.entry.get("stripped"):
            self._refit()
        self._make_contexts()

    @property
    def compatible(self) -> bool:
        """Whether the plan also runs on later versions of TensorRT."""
        return bool(self.manifest["trt"]["version_compatible"])

    def _check_host(self) -> None:
        built, version = self.entry["tensorrt"], self.module.__version__
        # Patch releases read each other's plans no more than minor ones do.
        if built != version and not (self.compatible and _numbers(version) >= _numbers(built)):
            hint = "" if self.compatible else ", or export with --version-compatible."
            raise TrtError(f"the engine was built by TensorRT {built}, this is {version}. {self.again}{hint}")
        arch = f"sm_{self.driver.architecture}"
        if arch not in self.entry["archs"]:
            raise TrtError(
                f"the engine was built for {', '.join(self.entry['archs'])} ({self.entry.get('gpu', 'unknown')}), this GPU is "
                f"{self.driver.name}, {arch}. {self.again}"
            )

    def _read(self) -> Any:
        path = self.folder / self.entry["file"]
        size = path.stat().st_size if path.is_file() else -1
        if size != self.entry["size_bytes"]:
            raise TrtError(
                f"{path} has {size} bytes, the manifest says {self.entry['size_bytes']}: it is missing, truncated or replaced. "
                f"Copy it again. {self.again}"
            )
        if native_file(self.folder, self.manifest, self.entry["file"]) is None:
            raise TrtError(f"the engine {path} {UNTRUSTED}.")
        if self.compatible:
            self.runtime.engine_host_code_allowed = True  # the plan includes the runtime of its version
        plan = np.memmap(path, np.uint8, "r")  # avoids a second copy of what may be gigabytes
        engine = self.runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise TrtError(
                f"TensorRT {self.module.__version__} refused {path}; its reason stands above. {self.memory_text()} {self.again}"
            )
        return engine

    def _refit(self) -> None:
        """Load weights from the package's graph into a stripped engine."""
        refitter = self.module.Refitter(self.engine, self.logger)
        parser = self.module.OnnxParserRefitter(refitter, self.logger)
        model = check_hash(self.folder, self.manifest, "model.onnx")
        for name in listed_weights(model, self.manifest):
            check_hash(self.folder, self.manifest, name)
        if not parser.refit_from_file(str(model)) or not refitter.refit_cuda_engine():
            reasons = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors)) or "its reason stands above"
            raise TrtError(f"the engine's weights cannot be read from {model}: {reasons}. {self.again}")

    def _make_contexts(self) -> None:
        """One context for each profile, with shared scratch memory, because they never run at the same time."""
        self.contexts: dict[str, Any] = {}
        try:
            self._scratch = Buffer(self.driver, self._scratch_bytes())
        except CudaError as error:
            raise TrtError(
                f"{error} The engine needs that beside its weights: build it with a smaller --batch."
            ) from error
        for number, profile in enumerate(self.entry["profiles"]):
            context = self._new_context()
            if context is None:
                raise TrtError(
                    f"TensorRT cannot make an execution context; its reason stands above. {self.memory_text()}"
                )
            if hasattr(context, "set_device_memory"):
                context.set_device_memory(self._scratch.address, self._scratch.size)
            else:
                context.device_memory = self._scratch.address
            if not context.set_optimization_profile_async(number, self.driver.stream.value):
                raise TrtError(f"the engine has no profile {profile}. {self.again}")
            self.contexts[profile] = context
        self.driver.synchronize()

    def _new_context(self) -> Any:
        strategy = getattr(self.module, "ExecutionContextAllocationStrategy", None)
        if strategy is not None:
            return self.engine.create_execution_context(strategy.USER_MANAGED)
        return self.engine.create_execution_context_without_device_memory()

    def _scratch_bytes(self) -> int:
        size = getattr(self.engine, "device_memory_size_v2", None)
        return int(self.engine.device_memory_size if size is None else size)

    def memory_text(self) -> str:
        """Free device memory, as text."""
        free, total = self.driver.memory()
        return f"{free >> 20} of {total >> 20} MiB of device memory are free."


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
