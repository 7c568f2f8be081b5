"""Layers of type "mamba", for the generic rooms."""

from __future__ import annotations

from typing import Any

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStatesMixer
from still_export.mixers.mamba.module import MODULES
from still_graphs.ops.causal_conv import CAUSAL_CONV
from still_graphs.ops.linear_attention import LINEAR_ATTENTION


class MambaMixer(FixedStatesMixer):
    """Layers of type "mamba"."""

    name = "mamba"
    modules, what = MODULES, "Mamba"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        if hasattr(config, "mamba_expand"):  # Jamba
            channels, dim, taps = config.mamba_expand * config.hidden_size, config.mamba_d_state, config.mamba_d_conv
        else:
            channels, dim, taps = config.intermediate_size, config.state_size, config.conv_kernel
        return (
            LayerOp(CAUSAL_CONV, {"activation": "silu"}, {"C": channels, "P": taps - 1}),
            LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, {"H": channels, "D": dim, "V": 1}),
        )
