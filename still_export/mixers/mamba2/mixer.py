"""Layers of type "mamba2", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStatesMixer, class_for
from still_export.mixers.mamba2.module import MODULES
from still_graphs.ops.causal_conv import CAUSAL_CONV
from still_graphs.ops.linear_attention import LINEAR_ATTENTION

_NAMES = {
    "heads": ("mamba_n_heads", "mamba_num_heads", "num_heads"),
    "groups": ("mamba_n_groups", "n_groups"),
    "dim": ("mamba_d_state", "ssm_state_size", "state_size"),
    "size": ("mamba_d_head", "mamba_head_dim", "head_dim"),
    "taps": ("mamba_d_conv", "conv_kernel"),
}
"""What hybrid families, Nemotron-H and Mamba-2 itself call the sizes."""


class Mamba2Mixer(FixedStatesMixer):
    """Layers of type "mamba2"."""

    name = "mamba2"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        sizes = {
            what: int(next(getattr(config, name) for name in names if getattr(config, name, None) is not None))
            for what, names in _NAMES.items()
        }
        heads, dim, size = sizes["heads"], sizes["dim"], sizes["size"]
        channels = heads * size + 2 * sizes["groups"] * dim
        return (
            LayerOp(CAUSAL_CONV, {"activation": "silu"}, {"C": channels, "P": sizes["taps"] - 1}),
            LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, {"H": heads, "D": dim, "V": size}),
        )

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        return class_for(base, MODULES, "Mamba-2")(base, self.ops(config, index), config)
