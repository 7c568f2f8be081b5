"""Layers of type "gated_delta_net", for the generic rooms."""

from __future__ import annotations

from typing import Any

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStatesMixer
from still_export.mixers.gated_delta_net.module import MODULES
from still_graphs.ops.causal_conv import CAUSAL_CONV
from still_graphs.ops.linear_attention import LINEAR_ATTENTION


class GatedDeltaNetMixer(FixedStatesMixer):
    """Layers of type "gated_delta_net"."""

    name = "gated_delta_net"
    modules, what = MODULES, "gated delta rule"
    rule = "gated_delta"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
        dim, size = config.linear_key_head_dim, config.linear_value_head_dim
        channels = 2 * key_heads * dim + heads * size
        return (
            LayerOp(CAUSAL_CONV, {"activation": "silu"}, {"C": channels, "P": config.linear_conv_kernel_dim - 1}),
            LayerOp(LINEAR_ATTENTION, {"update_rule": self.rule, "scale": 0.0}, {"H": heads, "D": dim, "V": size}),
        )


class DeltaNetMixer(GatedDeltaNetMixer):
    """Layers of type "delta_net": the delta rule without a decay."""

    name = "delta_net"
    rule = "delta"
