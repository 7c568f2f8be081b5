"""Layers of type "lightning_attention", for the generic rooms."""

from __future__ import annotations

from typing import Any

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStatesMixer
from still_export.mixers.lightning_attention.module import MODULES
from still_graphs.ops.linear_attention import LINEAR_ATTENTION


class LightningAttentionMixer(FixedStatesMixer):
    """Layers of type "lightning_attention"; a family's configuration says their `lightning_sizes`: H, D, V and the output's scale."""

    name = "lightning_attention"
    modules, what = MODULES, "Lightning attention"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        heads, dim, size, scale = config.lightning_sizes(index)
        attributes = {"update_rule": "gated", "scale": scale}
        return (LayerOp(LINEAR_ATTENTION, attributes, {"H": heads, "D": dim, "V": size}),)
