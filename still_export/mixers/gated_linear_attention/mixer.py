"""The gated rule, replacing a family's module: projections, optional convolution, rule, norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStateModule, FixedStatesMixer
from still_export.mixers.projections import rotate
from still_export.mixers.roles import GATE, NORM, PROJECTION
from still_kernels.causal_conv.call import causal_conv
from still_kernels.causal_conv.meaning import Inputs as ConvInputs
from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.linear_attention.call import linear_attention
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.spec import LINEAR_ATTENTION

Heads = tuple[Tensor, Tensor, Tensor]
Turn = tuple[Tensor, Tensor] | None
LOGIT_NORMALIZER = 16
"""GLA divides the logarithm of its decay by this number, which no configuration has."""


class GatedLinearAttention(FixedStateModule):
    """GLA: a decay of low rank; several query heads may share a state."""

    names: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"), PROJECTION),
        **dict.fromkeys(("g_proj.weight", "gk_proj.0.weight", "gk_proj.1.weight"), GATE),
        "conv1d.weight": NORM,
    }

    def __init__(self, base: Any, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, ops)
        self.heads, self.query_heads = base.num_v_heads, base.num_q_heads
        self.dim, self.size = base.head_k_dim, base.head_v_dim
        self.activation: str | None = base.activation if base.taps else None
        self.least: float | None = getattr(base, "clamp_min", None)

    def parts(self, hidden: Tensor, heads: Heads, turn: Turn) -> tuple[Heads, Tensor]:
        """Returns (inputs of the rule, from projected queries and keys [B, T, heads, D] and values [B, T, H * V]; logarithm of the decay in
        at least float32, [B, T, heads, D or 1]). `turn`: cos and sin of positions, if the family has them."""
        forget = self.gk_proj(hidden).unflatten(-1, (self.heads, self.dim))
        decay = -softplus(-forget.to(torch.promote_types(forget.dtype, torch.float32))) / LOGIT_NORMALIZER
        return heads, decay if self.least is None else decay.clamp_min(self.least)

    def finish(self, output: Tensor, hidden: Tensor) -> Tensor:
        """Input of the output projection, from the rule's `output` [B, T, query heads, V]."""
        gate = self.g_proj(hidden).unflatten(-1, (-1, self.size)) if hasattr(self, "g_proj") else None
        result: Tensor = self.o_norm(output, gate)
        return result.flatten(2)

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, position_embeddings: Turn = None, **kwargs: Any
    ) -> Tensor:
        before, new_tokens, layer = self.begin(hidden_states, cache_params)
        after: dict[str, Tensor] = {}
        mixed = torch.cat([getattr(self, name)(hidden_states) for name in self.names], dim=-1)
        if self.activation is not None:
            taps = ConvInputs(mixed, self.conv1d.weight, self.conv1d.bias, new_tokens, self.activation)
            mixed, after["conv_state"] = causal_conv(taps, before["conv_state"])
        queries, keys = self.query_heads * self.dim, self.heads * self.dim
        query, key, value = mixed.split((queries, keys, self.heads * self.size), dim=-1)
        query, key = (x.unflatten(-1, (-1, self.dim)) for x in (query, key))
        (query, key, value), decay = self.parts(hidden_states, (query, key, value), position_embeddings)
        inputs = Inputs(
            query.unflatten(2, (-1, max(1, self.query_heads // self.heads))),
            key,
            value.unflatten(-1, (self.heads, self.size)),
            decay,
            new_tokens=new_tokens,
            update_rule="gated",
        )
        output, after["recurrent_state"] = linear_attention(inputs, before["recurrent_state"])
        if layer is not None:
            layer.store(after)
        return self.o_proj(self.finish(output.flatten(2, 3), hidden_states))


class Retention(GatedLinearAttention):
    """RetNet: head h decays its state by 1 - 2^(-5 - h) at each token; queries and keys are rotated by their positions."""

    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"), PROJECTION),
        "g_proj.weight": GATE,
        "conv1d.weight": NORM,
    }

    def parts(self, hidden: Tensor, heads: Heads, turn: Turn) -> tuple[Heads, Tensor]:
        assert turn is not None
        query, key, value = heads
        cos, sin = (x[:, :, None] for x in turn)
        wide = torch.promote_types(query.dtype, torch.float32)
        decay = torch.tensor(
            [math.log1p(-(2.0 ** (-5 - h))) for h in range(self.heads)], dtype=wide, device=query.device
        )
        return (rotate(query, cos, sin), rotate(key, cos, sin), value), decay[:, None].expand(*query.shape[:3], 1)


class HGRN2(GatedLinearAttention):
    """HGRN2: k = 1 - exp(decay); layers after the first have a lower bound of exp(decay)."""

    names: ClassVar[tuple[str, ...]] = ("q_proj", "f_proj", "i_proj")
    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("q_proj.weight", "i_proj.weight", "o_proj.weight"), PROJECTION),
        "f_proj.weight": GATE,
        "conv1d.weight": NORM,
    }

    def gates(self, forget: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (keys, logarithm of the decay) of `forget` [B, T, heads, D], both in at least float32."""
        forget = forget.to(torch.promote_types(forget.dtype, torch.float32))
        written = (-forget).sigmoid()
        if not hasattr(self, "lower_bound"):
            return written, -softplus(-forget)
        bound = self.lower_bound.view(self.heads, self.dim).to(forget.dtype)
        return (1 - bound) * written, (bound + (1 - bound) * forget.sigmoid()).log()

    def parts(self, hidden: Tensor, heads: Heads, turn: Turn) -> tuple[Heads, Tensor]:
        query, key, value = heads
        written, decay = self.gates(key)
        return (silu(query), written.to(key.dtype), value), decay

    def finish(self, output: Tensor, hidden: Tensor) -> Tensor:
        return self.g_norm(output.flatten(2))


class HGRN(HGRN2):
    """HGRN (version 1): one number of state per channel, so queries and keys are 1; with an output gate."""

    names = ("f_proj", "i_proj")
    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("i_proj.weight", "o_proj.weight"), PROJECTION),
        **dict.fromkeys(("f_proj.weight", "g_proj.weight"), GATE),
        "conv1d.weight": NORM,
    }

    def parts(self, hidden: Tensor, heads: Heads, turn: Turn) -> tuple[Heads, Tensor]:
        _, key, value = heads
        written, decay = self.gates(key)
        one = key.new_ones(1, 1, 1, 1).expand(*key.shape[:2], 1, 1)
        return (one, one, (silu(value) * written.flatten(2)).to(value.dtype)), decay

    def finish(self, output: Tensor, hidden: Tensor) -> Tensor:
        return self.g_norm(output.flatten(2), self.g_proj(hidden))


MODULES: dict[str, type[GatedLinearAttention]] = {
    "FlaGLA": GatedLinearAttention,
    "FlaHGRN2": HGRN2,
    "FlaHGRN": HGRN,
    "FlaRetNet": Retention,
}


class GatedLinearAttentionMixer(FixedStatesMixer):
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
