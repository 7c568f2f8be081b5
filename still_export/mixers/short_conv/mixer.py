"""Layers of type "short_conv", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStatesMixer
from still_export.mixers.short_conv.module import ShortConv
from still_graphs.ops.causal_conv import CAUSAL_CONV


class ShortConvMixer(FixedStatesMixer):
    """Layers of type "short_conv"."""

    name = "short_conv"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        return (LayerOp(CAUSAL_CONV, {"activation": "none"}, {"C": config.hidden_size, "P": config.conv_L_cache - 1}),)

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        return ShortConv(base, self.ops(config, index))
