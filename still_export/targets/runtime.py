"""What a runtime is: one record that says what opens packages with it. Everything else asks the record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from still_export.runtime.base import Runner


@dataclass(frozen=True)
class Runtime:
    """What runs packages here.

    Args:
        name: As `--runtime` has it.
        title: For people.
        open: The runner of a package: its folder, manifest, provider, threads, plugin library, and whether to compare hashes.
        repeat: Of folder, manifest, provider and plugin library the command that repeats a call with polygraphy.
        polygraphy: The runtime's name there.
        modules: Python modules without which it cannot start.
        providers: That `--provider` may name beside cpu.
        engines: It runs what `still-export build` makes, with counts in int32 and prompts of at most a profile's tokens.
    """

    name: str
    title: str
    open: Callable[[Path, dict[str, Any], str, int, Path | None, bool], Runner]
    repeat: Callable[[Path, dict[str, Any], str, Path | None], list[str]]
    polygraphy: str
    modules: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    engines: bool = False
