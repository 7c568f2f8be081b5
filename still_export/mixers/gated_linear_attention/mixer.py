"""Layers of type "gated_linear_attention", for the generic rooms."""

from __future__ import annotations

from typing import Any

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStatesMixer
from still_export.mixers.gated_linear_attention.module import MODULES
from still_graphs.ops.causal_conv import CAUSAL_CONV
from still_graphs.ops.linear_attention import LINEAR_ATTENTION


class GatedLinearAttentionMixer(FixedStatesMixer):
    """Layers of type "gated_linear_attention"."""

    name = "gated_linear_attention"
    modules, what = MODULES, "gated rule"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        heads, taps = config.linear_num_value_heads, config.linear_conv_kernel_dim
        dim, size = config.linear_key_head_dim, config.linear_value_head_dim
        rule = LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 0.0}, {"H": heads, "D": dim, "V": size})
        if not taps:
            return (rule,)
        channels = (config.linear_num_query_heads + heads) * dim + heads * size
        activation = config.linear_conv_activation
        return LayerOp(CAUSAL_CONV, {"activation": activation}, {"C": channels, "P": taps - 1}), rule
