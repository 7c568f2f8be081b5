"""What to type after making a package."""

from __future__ import annotations

import shlex
from pathlib import Path

from still_export.proof.reference import OWN


def next_commands(package: Path, target: str) -> str:
    """The line that names what can be done with a package for `target` that is complete."""
    if target not in OWN:
        return f"next: load the engine with {target}'s own API; docs/reference/tensorrt.md has its inputs and outputs"
    shown = shlex.quote(str(package))
    return f'next: still-export run {shown} --prompt "..."   or   still-export verify {shown}'
