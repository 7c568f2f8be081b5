"""The excuses of a package, looked up by the layers that its manifest lists: one line a mixer that chooses. No torch."""

from __future__ import annotations

from typing import Any

from still_export.mixers.hybrid_attention.ties import SelectionExcuse
from still_export.mixers.ties import Excuses

EXCUSES = {"hybrid_attention": SelectionExcuse}
"""By type of layer, the class that excuses its op, made from the manifest; what chooses nothing needs none."""


def excuses_of(manifest: dict[str, Any]) -> Excuses:
    """The excuses of the layers that a package has."""
    kinds = dict.fromkeys(manifest["model"]["layer_types"])
    return Excuses(EXCUSES[kind](manifest) for kind in kinds if kind in EXCUSES)
