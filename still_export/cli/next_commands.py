"""What to type after making a package."""

from __future__ import annotations

import shlex
from pathlib import Path


def next_commands(package: Path, target: str, ready: bool = True) -> str:
    """The line that names what can be done with a package for `target`; `ready`: it is complete, with engines where it has some."""
    from still_export.targets.registry import target_of

    if not ready:
        return f"next: still-export build {shlex.quote(str(package))}"
    if target_of(target).runtime is None:
        return f"next: load the engine with {target}'s own API; docs/reference/runtimes.md has its inputs and outputs"
    shown = shlex.quote(str(package))
    return f'next: still-export run {shown} --prompt "..."   or   still-export verify {shown}'
