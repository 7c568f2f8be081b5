"""Layers of type "rwkv7", for the generic rooms."""

from __future__ import annotations

from typing import Any

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStatesMixer
from still_export.mixers.rwkv7.module import MODULES
from still_graphs.ops.causal_conv import CAUSAL_CONV
from still_graphs.ops.rank_one_attention import RANK_ONE_ATTENTION


class Rwkv7Mixer(FixedStatesMixer):
    """Layers of type "rwkv7": the family's own `layer_types` say "linear_attention" mixes tokens, "conv" mixes channels."""

    name = "rwkv7"
    modules, what = MODULES, "RWKV-7"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        shift = LayerOp(CAUSAL_CONV, {"activation": "none"}, {"C": config.hidden_size, "P": 1})
        if config.layer_types[index] == "conv":
            return (shift,)
        sizes = {"H": config.num_attention_heads, "D": config.head_dim, "V": config.head_dim}
        return shift, LayerOp(RANK_ONE_ATTENTION, {}, sizes)
