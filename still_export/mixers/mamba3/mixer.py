"""Layers of type "mamba3", for the generic rooms."""

from __future__ import annotations

from typing import Any

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStatesMixer
from still_export.mixers.mamba3.module import Mamba3
from still_graphs.ops.angle_sum import ANGLE_SUM
from still_graphs.ops.causal_conv import CAUSAL_CONV
from still_graphs.ops.linear_attention import LINEAR_ATTENTION


class Mamba3Mixer(FixedStatesMixer):
    """Layers of type "mamba3"."""

    name = "mamba3"
    modules, what = {"Mamba3Weights": Mamba3}, "Mamba-3"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        heads, dim, size = config.num_attention_heads, config.state_size, config.head_dim
        return (
            LayerOp(ANGLE_SUM, {}, {"H": heads, "A": config.angles}),
            LayerOp(CAUSAL_CONV, {"activation": "none"}, {"C": heads * (dim + size + 1), "P": 1}),
            LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, {"H": heads, "D": dim, "V": size}),
        )
