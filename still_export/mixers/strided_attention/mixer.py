"""Layers of type "strided_attention", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.attention.mixer import KeysMixer
from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import class_for
from still_export.mixers.layers import head_size
from still_export.mixers.strided_attention.cache import StridedLayer
from still_export.mixers.strided_attention.module import Rat
from still_graphs.ops.linear_attention import LINEAR_ATTENTION
from still_graphs.ops.strided_attention import STRIDED_ATTENTION


class StridedAttentionMixer(KeysMixer):
    """Layers of type "strided_attention"; a family's configuration has `row_tokens`."""

    name = "strided_attention"
    of_families = True
    as_numbers = "keeps chunks' ends, which are kept as numbers"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        heads, dim = config.num_attention_heads, head_size(config)
        scan = LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, {"H": 2 * heads * dim, "D": 1, "V": 1})
        sizes = {"H": heads, "HK": heads, "D": dim}
        return scan, LayerOp(STRIDED_ATTENTION, {"row_tokens": config.row_tokens}, sizes)

    def cache_layer(self, config: Any, index: int) -> StridedLayer:
        scan, _ = self.ops(config, index)
        return StridedLayer(
            (scan,), config.row_tokens, config.num_attention_heads, head_size(config), config.still.deployment.cache
        )

    def made(self, base: nn.Module, config: Any, index: int) -> Rat:
        kind = class_for(base, {"RatMixer": Rat}, "strided attention")
        return kind(base, self.ops(config, index)[:1], config.row_tokens)
