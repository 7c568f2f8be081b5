"""Which runtime a package runs on, and what to type after making one."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from still_export.errors import ConfigError

TrustNative = Annotated[
    bool,
    typer.Option(
        "--trust-native", help="Load native code of the package that this machine did not build, and remember it."
    ),
]
RUNTIMES = {"onnx": "ort", "trt": "trt"}


def runtime_of(target: str, asked: str | None) -> str:
    """The runtime of packages for `target`, "ort" or "trt".

    Args:
        target: As in the manifest.
        asked: The flag --runtime, which names that runtime or none.

    Raises:
        ConfigError: Another runtime was asked for, or nothing here runs such packages.
    """
    runtime = RUNTIMES.get(target)
    if runtime is None:
        raise ConfigError(f"a package for {target} is built here, not run: its engines are for programs of your own.")
    if asked not in (None, runtime):
        raise ConfigError(f"a package for {target} does not run with --runtime {asked}; it runs with {runtime}.")
    return runtime


def next_commands(package: Path, target: str) -> str:
    """The line that names what can be done with a package for `target` that is complete."""
    if target not in RUNTIMES:
        return f"next: load the engine with {target}'s own API; docs/tensorrt.md has its inputs and outputs"
    shown = shlex.quote(str(package))
    return f'next: still-export run {shown} --prompt "..."   or   still-export verify {shown}'
