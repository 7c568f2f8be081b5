"""The gated rule in the place of a family's module: projections, a convolution where there is one, rule, norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from still_export.mixers.base import LayerOp
from still_export.mixers.causal_conv.op import causal_conv
from still_export.mixers.fixed import FixedStateModule
from still_export.mixers.linear_attention.op import linear_attention
from still_export.mixers.roles import GATE, NORM, PROJECTION
from still_kernels.causal_conv import Inputs as ConvInputs
from still_kernels.linear_attention import Inputs

LOGIT_NORMALIZER = 16
"""GLA divides the logarithm of its decay by it; no checkpoint's configuration says so."""


class GatedLinearAttention(FixedStateModule):
    """GLA: a decay of low rank; several query heads may share a state.

    Args:
        base: The family's module; its submodules and parameters are taken over, not copied.
        ops: Of the layer.
    """

    names: ClassVar[tuple[str, str, str]] = ("q_proj", "k_proj", "v_proj")
    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"), PROJECTION),
        **dict.fromkeys(("g_proj.weight", "gk_proj.0.weight", "gk_proj.1.weight"), GATE),
        "conv1d.weight": NORM,
    }
    """Of parameters that are no vectors, by name (mixers/roles.py)."""

    def __init__(self, base: Any, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, ops)
        self.heads, self.query_heads = base.num_v_heads, base.num_q_heads
        self.dim, self.size = base.head_k_dim, base.head_v_dim
        self.activation: str | None = base.activation if base.taps else None
        self.least: float | None = getattr(base, "clamp_min", None)

    def parts(self, hidden: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the rule reads as queries and keys, and the decay's logarithm in at least float32, each [B, T, heads, D]."""
        forget = self.gk_proj(hidden).unflatten(-1, (self.heads, self.dim))
        decay = -softplus(-forget.to(torch.promote_types(forget.dtype, torch.float32))) / LOGIT_NORMALIZER
        return query, key, decay if self.least is None else decay.clamp_min(self.least)

    def finish(self, output: Tensor, hidden: Tensor) -> Tensor:
        """What is projected, of the rule's `output` [B, T, query heads, V]."""
        gate = self.g_proj(hidden).unflatten(-1, (-1, self.size)) if hasattr(self, "g_proj") else None
        result: Tensor = self.o_norm(output, gate)
        return result.flatten(2)

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """The call of a decoder layer. `attention_mask` is not used: the cache knows the sequences' new tokens."""
        before, new_tokens, layer = self.begin(hidden_states, cache_params)
        after: dict[str, Tensor] = {}
        mixed = torch.cat([getattr(self, name)(hidden_states) for name in self.names], dim=-1)
        if self.activation is not None:
            taps = ConvInputs(mixed, self.conv1d.weight, self.conv1d.bias, new_tokens, self.activation)
            mixed, after["conv_state"] = causal_conv(taps, before["conv_state"])
        queries, keys = self.query_heads * self.dim, self.heads * self.dim
        query, key, value = mixed.split((queries, keys, self.heads * self.size), dim=-1)
        query, key = (x.unflatten(-1, (-1, self.dim)) for x in (query, key))
        query, key, decay = self.parts(hidden_states, query, key)
        inputs = Inputs(
            query.unflatten(2, (self.heads, self.query_heads // self.heads)),
            key,
            value.unflatten(-1, (self.heads, self.size)),
            decay,
            new_tokens=new_tokens,
            update_rule="gated",
        )
        output, after["recurrent_state"] = linear_attention(inputs, before["recurrent_state"])
        if layer is not None:
            layer.store(after)
        result: Tensor = self.o_proj(self.finish(output.flatten(2, 3), hidden_states))
        return result


class HGRN2(GatedLinearAttention):
    """HGRN2: what is forgotten is what is written, k = 1 - exp(decay); later layers forget no more than a bound."""

    names = ("q_proj", "f_proj", "i_proj")
    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("q_proj.weight", "i_proj.weight", "o_proj.weight"), PROJECTION),
        "f_proj.weight": GATE,
        "conv1d.weight": NORM,
    }

    def parts(self, hidden: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        forget = key.to(wide)
        written = (-forget).sigmoid()
        if not hasattr(self, "lower_bound"):
            return silu(query), written.to(key.dtype), -softplus(-forget)
        bound = self.lower_bound.view(self.heads, self.dim).to(wide)
        written = (1 - bound) * written
        return silu(query), written.to(key.dtype), (bound + (1 - bound) * forget.sigmoid()).log()

    def finish(self, output: Tensor, hidden: Tensor) -> Tensor:
        result: Tensor = self.g_norm(output.flatten(2))
        return result


MODULES: dict[str, type[GatedLinearAttention]] = {"FlaGLA": GatedLinearAttention, "FlaHGRN2": HGRN2}
"""By the class that each takes the place of."""
