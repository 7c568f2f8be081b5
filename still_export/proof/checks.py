"""What must hold of a runtime by itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """Something that must hold of a runtime by itself."""

    name: str
    passed: bool
    detail: str = ""
