"""The ties of a package, looked up by the layers that its manifest lists: one line a mixer that chooses. No torch."""

from __future__ import annotations

from typing import Any

from still_export.mixers.hybrid_attention.ties import SelectionTies
from still_export.mixers.ties import Ties

TIES = {"hybrid_attention": SelectionTies}
"""By type of layer, the class that knows the ties of its op, made from the manifest; what chooses nothing needs none."""


def ties_of(manifest: dict[str, Any]) -> Ties:
    """The ties of the layers that a package has."""
    kinds = dict.fromkeys(manifest["model"]["layer_types"])
    return Ties(TIES[kind](manifest) for kind in kinds if kind in TIES)
