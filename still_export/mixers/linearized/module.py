"""Linear attention in the place of a softmax module: its projections and positions, gates of its own, one state per query head.

A student of few tokens should not have to find order and heads anew: RoPE stays, values stay as they are, keys and values are shared by
the query heads as before, and fresh gates give each head a memory that is usable at once.

Source: KL-guided layer selection, arXiv:2512.20569; GLA, arXiv:2312.06635; Gated DeltaNet, arXiv:2412.06464.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from still_export.mixers.base import LayerOp
from still_export.mixers.gated_linear_attention.module import LOGIT_NORMALIZER
from still_export.mixers.linear_attention.recurrent import recurrent
from still_export.mixers.projections import ProjectedAttention, unit_length
from still_export.mixers.roles import GATE, NORM
from still_export.mixers.trainable import TrainableModule, softmax_attention
from still_kernels.linear_attention import Inputs

SHORTEST, LONGEST = 16.0, 4096.0
"""Tokens after which fresh memories keep 1/e: spread evenly on a logarithmic scale."""
OPEN_GATE = 1.2784645
"""silu of it is 1."""
NORM_EPSILON = 1e-6
LOW_RANK = 16
"""Of GLA's decay."""


class LinearizedAttention(ProjectedAttention):
    """What both rules share: normed output per head, times a scale per channel and a gate, into the base's output projection.

    Args:
        base: The family's attention module; its submodules are taken over, not copied.
        head_dim: D.
        heads: H, query heads.
        hidden_size: Channels of the model.
        ops: Of the layer.
    """

    rule: ClassVar[str]
    weight_roles: ClassVar[dict[str, str]] = ProjectedAttention.weight_roles | {
        "z_proj.weight": GATE,
        "output_scale": NORM,
    }
    fresh: ClassVar[tuple[str, ...]] = ("z_proj.", "output_scale")

    def __init__(self, base: Any, head_dim: int, heads: int, hidden_size: int, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, head_dim)
        self.num_heads, self.ops = heads, tuple(ops)
        like: dict[str, Any] = {"device": base.q_proj.weight.device, "dtype": base.q_proj.weight.dtype}
        self.z_proj = nn.Linear(hidden_size, heads * head_dim, **like)
        self.output_scale = nn.Parameter(torch.empty(heads, head_dim, **like))
        self.add_gates(hidden_size, like)
        self.reset_parameters()

    def add_gates(self, hidden_size: int, like: dict[str, Any]) -> None:
        """The rule's own parameters."""
        raise NotImplementedError

    def rule_inputs(
        self, hidden: Tensor, query: Tensor, key: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query [B, T, H, D] and key [B, T, HK, D] as the rule reads them, its decay [B, T, H, D or 1] and beta [B, T, H] or None, the
        last two in at least float32."""
        raise NotImplementedError

    def initial(self, name: str) -> Tensor:
        parameter = self.get_parameter(name)
        if name == "z_proj.bias":
            return torch.full(parameter.shape, OPEN_GATE, dtype=parameter.dtype)
        fill = torch.ones if name == "output_scale" else torch.zeros
        return fill(parameter.shape, dtype=parameter.dtype)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The call of a transformers decoder layer. `attention_mask` is not used: the cache knows the rows' new tokens, and without a
        cache right padding comes after every real token."""
        rows = self.mixed(hidden_states, position_embeddings, past_key_values)
        gate = silu(self.z_proj(hidden_states)).unflatten(-1, (self.num_heads, self.head_dim))
        return self.o_proj((rows * self.output_scale * gate).to(hidden_states.dtype).flatten(2)), None

    def mixed(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        """The rule's outputs [B, T, H, D], each of root mean square 1, in at least float32."""
        query, key, value = self.heads(hidden)
        query, key, decay, beta = self.rule_inputs(hidden, query, key, position_embeddings)
        query, key = query.to(value.dtype), key.to(value.dtype)
        value = value.repeat_interleave(self.num_heads // value.shape[2], dim=2)
        with torch.autocast(hidden.device.type, enabled=False):  # the kernel chooses its own precision
            inputs = Inputs(query[:, :, :, None], key, value, decay, beta, None, self.rule)
            output = recurrent(inputs, past_key_values, self.layer_idx, self.ops)
            rows = output[:, :, :, 0].to(torch.promote_types(output.dtype, torch.float32))
            return rows * torch.rsqrt((rows * rows).mean(-1, keepdim=True) + NORM_EPSILON)


class LinearizedGLA(LinearizedAttention):
    """The gated rule with a decay per key channel, of low rank."""

    rule = "gated"
    # Of so few inputs no block of a quantized weight can be made, and nothing saved.
    weight_roles = LinearizedAttention.weight_roles | {"gk_proj.0.weight": GATE, "gk_proj.1.weight": NORM}
    fresh = (*LinearizedAttention.fresh, "gk_proj.")

    def add_gates(self, hidden_size: int, like: dict[str, Any]) -> None:
        self.gk_proj = nn.Sequential(
            nn.Linear(hidden_size, LOW_RANK, bias=False, **like),
            nn.Linear(LOW_RANK, self.num_heads * self.head_dim, **like),
        )

    def initial(self, name: str) -> Tensor:
        parameter = self.get_parameter(name)
        if name == "gk_proj.0.weight":  # the one factor that is not zero
            random = torch.Generator().manual_seed(self.layer_idx)
            start = torch.randn(parameter.shape, generator=random) * parameter.shape[1] ** -0.5
            return start.to(parameter.dtype)
        if name == "gk_proj.1.bias":  # channels that RoPE turns fast are of the near past
            half = memories(self.head_dim // 2)
            bias = -torch.expm1(LOGIT_NORMALIZER / torch.cat((half, half))).log()
            return bias.repeat(self.num_heads).to(parameter.dtype)
        return super().initial(name)

    def rule_inputs(
        self, hidden: Tensor, query: Tensor, key: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        query, key = self.turned(query, key, position_embeddings)
        forget = self.gk_proj(hidden).to(torch.promote_types(hidden.dtype, torch.float32))
        decay = -softplus(-forget) / LOGIT_NORMALIZER
        return query, key, decay.unflatten(-1, (self.num_heads, self.head_dim)), None


class LinearizedGatedDeltaNet(LinearizedAttention):
    """The gated delta rule; queries and keys of unit length, then turned by their positions."""

    rule = "gated_delta"
    weight_roles = LinearizedAttention.weight_roles | {"a_proj.weight": GATE, "b_proj.weight": GATE}
    fresh = (*LinearizedAttention.fresh, "a_proj.", "b_proj.", "A_log", "dt_bias")

    def add_gates(self, hidden_size: int, like: dict[str, Any]) -> None:
        self.a_proj, self.b_proj = (nn.Linear(hidden_size, self.num_heads, bias=False, **like) for _ in range(2))
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(self.num_heads, **like)) for _ in range(2))

    def initial(self, name: str) -> Tensor:
        if name == "dt_bias":
            return torch.expm1(1 / memories(self.num_heads)).log().to(self.dt_bias.dtype)
        return super().initial(name)

    def rule_inputs(
        self, hidden: Tensor, query: Tensor, key: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        query, key = (unit_length(silu(x.to(wide))) for x in (query, key))
        query, key = self.turned(query, key, position_embeddings)
        steps = softplus(self.a_proj(hidden).to(wide) + self.dt_bias.to(wide))
        decay = -self.A_log.to(wide).exp() * steps
        return query, key, decay[..., None], self.b_proj(hidden).to(wide).sigmoid()


def memories(count: int) -> Tensor:
    """Tokens after which `count` fresh memories keep 1/e, shortest first, [count]."""
    return torch.logspace(math.log10(SHORTEST), math.log10(LONGEST), count)


class Fitted(TrainableModule, LinearizedAttention):
    """The form that trains; before a transfer its scales are fitted to the teacher's outputs."""

    @torch.no_grad()
    def fit(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> None:
        """Set `output_scale` so that the outputs of each channel are as large as the base's."""
        query, key, value = self.heads(hidden)
        query, key = self.turned(query, key, position_embeddings)
        target = softmax_attention(query, key, value)
        rows = self.mixed(hidden, position_embeddings, None)
        size, wanted = (x.float().square().mean((0, 1)).sqrt() for x in (rows, target))
        self.output_scale.copy_(wanted / size.clamp_min(NORM_EPSILON))


class TrainableGLA(Fitted, LinearizedGLA):
    """LinearizedGLA as teacher and student."""


class TrainableGatedDeltaNet(Fitted, LinearizedGatedDeltaNet):
    """LinearizedGatedDeltaNet as teacher and student."""
