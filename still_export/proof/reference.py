"""From a package to the runner that a user asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from still_export.errors import ConfigError
from still_export.runtime.base import Runner
from still_export.targets.registry import target_of

PROVIDERS = ("cpu", "cuda")


def runtime_of(target: str, asked: str | None) -> str:
    """The runtime of packages for `target`: "ort", "trt" or "torch".

    Args:
        target: As in the manifest.
        asked: The flag --runtime: the target's own runtime, torch, or None = the target's own.

    Raises:
        ConfigError: Another runtime was asked for, or nothing here runs such packages.
    """
    runtime = target_of(target).runtime
    if runtime is None:
        raise ConfigError(f"a package for {target} is built here, not run: its engines are for programs of your own.")
    if asked not in (None, runtime, "torch"):
        raise ConfigError(
            f"a package for {target} does not run with --runtime {asked}; it runs with {runtime}, and with torch."
        )
    return asked or runtime


def open_runner(
    folder: Path,
    manifest: dict[str, Any],
    runtime: str,
    provider: str = "cpu",
    threads: int = 0,
    plugin: Path | None = None,
    check: bool = True,
) -> Runner:
    """The runner of the package `folder`.

    Args:
        folder: The package.
        manifest: Its manifest.
        runtime: "ort", "trt" or "torch".
        provider: Of ONNX Runtime, "cpu" or "cuda".
        threads: 0 = the runtime's choice.
        plugin: TensorRT's plugin library in the place of the package's.
        check: Compare the weights with their hashes.

    Raises:
        ConfigError: The provider is unknown, or not one of this runtime.
        RunError: The package does not run here.
    """
    if provider not in PROVIDERS:
        raise ConfigError(f"--provider {provider} is unknown; known: {', '.join(PROVIDERS)}.")
    if provider != "cpu" and runtime != "ort":
        raise ConfigError(f"--provider {provider} is ONNX Runtime's; this package runs with {runtime}.")
    if runtime == "ort":
        from still_export.runtime.ort import OrtModel

        return OrtModel(folder, threads, provider, check=check)
    if runtime == "trt":
        from still_export.runtime.tensorrt import TrtModel

        return TrtModel(folder, plugin)
    import torch

    from still_export.graph.options import ExportOptions
    from still_export.graph.quantization.read import held_model
    from still_export.runtime.torch import TorchModel

    if threads:
        torch.set_num_threads(threads)
    return TorchModel(manifest, held_model(ExportOptions.from_manifest(manifest), folder, manifest), folder)
