"""Layers of type "mean_attention", for the generic rooms."""

from __future__ import annotations

from typing import Any

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStatesMixer
from still_export.mixers.mean_attention.module import MODULES
from still_graphs.ops.causal_conv import CAUSAL_CONV
from still_graphs.ops.linear_attention import LINEAR_ATTENTION


class MeanAttentionMixer(FixedStatesMixer):
    """Layers of type "mean_attention"."""

    name = "mean_attention"
    modules, what = MODULES, "mean attention"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        sizes = {"H": heads, "D": config.key_size, "V": size + 1}
        rule = LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, sizes)
        if not config.kernel_size:
            return (rule,)
        taps = {"C": config.hidden_size, "P": config.kernel_size - 1}
        return LayerOp(CAUSAL_CONV, {"activation": "none"}, taps), rule
