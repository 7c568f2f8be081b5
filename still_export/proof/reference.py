"""From a package to the runner that a user asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from still_export.errors import ConfigError, unknown
from still_export.package.files import MODEL
from still_export.runtime.base import Runner
from still_export.targets import registry
from still_export.targets.runtime import Opening

PROVIDERS = ("cpu", "cuda")


def runtime_of(target: str, asked: str | None) -> str:
    """The name of the runtime of packages for `target`; `asked` and errors as of `still_export.targets.registry.runtime_of`."""
    return registry.runtime_of(target, asked).name


def open_runner(
    folder: Path,
    manifest: dict[str, Any],
    runtime: str,
    provider: str = "cpu",
    threads: int = 0,
    plugin: Path | None = None,
    check: bool = True,
    watch: tuple[str, ...] = (),
    bodies: bool = False,
    graph: str = MODEL,
    tensors: tuple[str, ...] = (),
) -> Runner:
    """The runner of the package `folder`.

    Args:
        folder: The package.
        manifest: Its manifest.
        runtime: Name of a runtime of the package's.
        provider: Of ONNX Runtime, "cpu" or "cuda".
        threads: 0 = the runtime's choice.
        plugin: TensorRT's plugin library in the place of the package's.
        check: Compare the weights with their hashes.
        watch: Ops whose first outputs are asked for, where the runtime can tell them.
        bodies: Run function bodies, though there are kernels.
        graph: Of the package.
        tensors: Of the graph, which are asked for behind them; of ONNX Runtime alone.

    Raises:
        ConfigError: The provider is unknown, or not one of this runtime.
        RunError: The package does not run here.
    """
    record = registry.runtime_named(runtime)
    if provider not in PROVIDERS:
        raise unknown(provider, PROVIDERS, f"--provider {provider}")
    if provider not in ("cpu", *record.providers):
        raise ConfigError(f"--provider {provider} is ONNX Runtime's; this package runs with {runtime}.")
    return record.open(
        Opening(folder, manifest, provider, threads, plugin, check, watch, tensors=tensors, bodies=bodies, graph=graph)
    )
