"""RWKV-7's layers, replacing a family's modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, relu

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStateModule, FixedStatesMixer
from still_export.mixers.roles import FEED_FORWARD, GATE, NORM, PROJECTION
from still_kernels.causal_conv.call import causal_conv
from still_kernels.causal_conv.meaning import Inputs
from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.rank_one_attention.meaning import Inputs as RankOneInputs
from still_kernels.rank_one_attention.meaning import rank_one_attention
from still_kernels.rank_one_attention.spec import RANK_ONE_ATTENTION

LEAST_DECAY = -math.exp(-0.5)
"""Lower bound of the logarithm of RWKV-7's decay."""


class ShiftedModule(FixedStateModule):
    """A module with token shift."""

    def shift(self, x: Tensor, state: Tensor, new_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (previous token minus token for x [B, T, C], the state after the call)."""
        taps = x.new_tensor([1.0, -1.0]).expand(x.shape[-1], 1, 2)
        return causal_conv(Inputs(x, taps.contiguous(), None, new_tokens, "none"), state)


def rank_one_inputs(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, moved: Tensor, rate: Tensor, new_tokens: Tensor
) -> RankOneInputs:
    """Inputs of the op for RWKV-7's rule. The op reads the state after its decay, the model before.

    Args:
        query, key, value: [B, T, H, D].
        decay: Logarithm of the decay, [B, T, H, D], float32.
        moved, rate: Unit keys, and the rate at which the state's values under them are removed, both [B, T, H, D], float32.
    """
    back, forth = (-moved * (-decay).exp()).to(value.dtype), (moved * rate).to(value.dtype)
    return RankOneInputs(query, key, value, decay, back, forth, new_tokens)


class ChannelMix(ShiftedModule):
    """The squared relu of shifted tokens."""

    weight_roles: ClassVar[dict[str, str]] = dict.fromkeys(("key.weight", "value.weight"), FEED_FORWARD)

    def forward(self, hidden: Tensor, cache: Any, first: Tensor) -> Tensor:
        """Hidden states [B, T, C]; `first` is for layers that mix tokens."""
        states, new_tokens, layer = self.begin(hidden, cache)
        before, column = self.shift(hidden, states["conv_state"], new_tokens)
        if layer is not None:
            layer.store({"conv_state": column})
        return self.value(relu(self.key(hidden + before * self.x_k)).square())


class TimeMix(ShiftedModule):
    """The rule: before a token is written, the state's value under a unit key is partly removed, at a rate per channel."""

    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys((f"{x}_proj.weight" for x in "rkvo"), PROJECTION),
        **dict.fromkeys((f"{x}_lora.{i}.weight" for x in "wavg" for i in (0, 2)), GATE),
        **dict.fromkeys((*(f"x_{x}" for x in "rwkvag"), "r_k"), NORM),
    }

    def __init__(self, base: Any, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, ops)
        self.heads, self.key_epsilon = base.heads, base.key_epsilon

    def forward(self, hidden: Tensor, cache: Any, first: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (hidden states [B, T, C], the layer's values); layers after the first mix in the first layer's values, `first`."""
        states, new_tokens, layer = self.begin(hidden, cache)
        before, column = self.shift(hidden, states["conv_state"], new_tokens)
        mixed = {name: hidden + before * getattr(self, f"x_{name}") for name in "rwkvag"}
        query, key, value = (getattr(self, f"{name}_proj")(mixed[name]) for name in "rkv")
        if first.shape[-1]:
            value = value + self.v_lora(mixed["v"]).sigmoid() * (first - value)
        wide = torch.promote_types(hidden.dtype, torch.float32)

        def of_heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.heads, -1))

        decay = LEAST_DECAY * of_heads(self.w_lora(mixed["w"])).to(wide).sigmoid()
        rate = of_heads(self.a_lora(mixed["a"])).to(wide).sigmoid()
        moved = of_heads(key * self.k_k).to(wide)
        moved = moved * torch.rsqrt(moved.square().sum(-1, keepdim=True) + self.key_epsilon)
        key = of_heads(key).to(wide) * (1 + (rate - 1) * of_heads(self.k_a).to(wide))
        query, key, value = of_heads(query), key.to(value.dtype), of_heads(value)
        inputs = rank_one_inputs(query, key, value, decay, moved, rate, new_tokens)
        output, state = rank_one_attention(inputs, states["recurrent_state"])
        if layer is not None:
            layer.store({"conv_state": column, "recurrent_state": state})
        output = layer_norm(output.to(wide), output.shape[-1:], eps=self.g_norm.eps)
        scale, shift = (of_heads(x).to(wide) for x in (self.g_norm.weight, self.g_norm.bias))
        own = (query.to(wide) * key.to(wide) * self.r_k.to(wide)).sum(-1, keepdim=True) * value.to(wide)
        rows = (output * scale + shift + own).to(hidden.dtype).flatten(2)
        return self.o_proj(rows * self.g_lora(mixed["g"])), value.flatten(2)


MODULES: dict[str, type[ShiftedModule]] = {"Rwkv7TimeMix": TimeMix, "Rwkv7ChannelMix": ChannelMix}


class Rwkv7Mixer(FixedStatesMixer):
    """Layers of type "rwkv7": in the family's `layer_types`, "linear_attention" mixes tokens and "conv" mixes channels."""

    name = "rwkv7"
    modules, what = MODULES, "RWKV-7"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        shift = LayerOp(CAUSAL_CONV, {"activation": "none"}, {"C": config.hidden_size, "P": 1})
        if config.layer_types[index] == "conv":
            return (shift,)
        sizes = {"H": config.num_attention_heads, "D": config.head_dim, "V": config.head_dim}
        return shift, LayerOp(RANK_ONE_ATTENTION, {}, sizes)
