"""Layers of type "feed_forward", which mix no tokens and keep nothing: of families whose layers are single blocks."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.fixed import FixedStates


class FeedForwardMixer(Mixer):
    """Layers of type "feed_forward": the family's block stays where it is."""

    name = "feed_forward"
    of_families = True

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        return ()

    def cache_layer(self, config: Any, index: int) -> FixedStates:
        return FixedStates(())

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        return base
