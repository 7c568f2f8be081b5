"""Layers of type "feed_forward", which mix no tokens and keep nothing: of families whose layers are single blocks."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStatesMixer


class FeedForwardMixer(FixedStatesMixer):
    """Layers of type "feed_forward": the family's block stays where it is."""

    name = "feed_forward"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        return ()

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        return base
