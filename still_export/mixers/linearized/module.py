"""Linear attention that replaces a softmax module: the same projections and positions, new gates, one state per query head.

A student trained on few tokens should not relearn order and heads. RoPE and values stay unchanged, query heads share keys and values as
before, and initial gates give each head a usable memory.

Source: KL-guided layer selection, arXiv:2512.20569; GLA, arXiv:2312.06635; Gated DeltaNet, arXiv:2412.06464.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers.utils.generic import maybe_autocast

from still_export.mixers.base import LayerOp
from still_export.mixers.gated_linear_attention.mixer import LOGIT_NORMALIZER
from still_export.mixers.linear_attention.recurrent import recurrent
from still_export.mixers.paged import PagedProjection, Turn
from still_export.mixers.projections import ProjectedAttention, unit_length
from still_export.mixers.roles import GATE, NORM
from still_kernels.linear_attention.meaning import Inputs

SHORTEST, LONGEST = 16.0, 4096.0
"""Tokens after which fresh memories decay to 1/e, spaced evenly on a logarithmic scale."""
OPEN_GATE = 1.2784645
"""silu of it is 1."""
NORM_EPSILON = 1e-6
LOW_RANK = 16
"""Rank of GLA's decay."""


class LinearizedAttention(ProjectedAttention):
    """Shared by both rules: normed output per head, scaled per channel and gated, then the base's output projection.

    Args:
        head_dim: D.
        heads: H, query heads.
        ops: The layer's ops.
    """

    rule: ClassVar[str]
    per_key: ClassVar[bool]
    weight_roles: ClassVar[dict[str, str]] = ProjectedAttention.weight_roles | {
        "z_proj.weight": GATE,
        "output_scale": NORM,
    }
    fresh: ClassVar[tuple[str, ...]] = ("z_proj.", "output_scale")
    output_scale: nn.Parameter

    def __init__(self, base: Any, head_dim: int, heads: int, hidden_size: int, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, head_dim)
        self.num_heads, self.ops = heads, tuple(ops)
        like: dict[str, Any] = {"device": base.q_proj.weight.device, "dtype": base.q_proj.weight.dtype}
        for name, of in self.projections(head_dim).items():
            last = nn.Linear(of.low_rank or hidden_size, heads * of.size, bias=of.bias, **like)
            first = [nn.Linear(hidden_size, of.low_rank, bias=False, **like)] if of.low_rank else []
            self.add_module(name, nn.Sequential(*first, last) if first else last)
        for name, shape in self.head_weights(heads, head_dim).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **like)))
        self.reset_parameters()

    @classmethod
    def projections(cls, dim: int) -> dict[str, PagedProjection]:
        """Linear layers of hidden states that a base's attention lacks, by name."""
        return {"z_proj": PagedProjection(dim, bias=True)}

    @classmethod
    def head_weights(cls, heads: int, dim: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the other new parameters, by name; the first dimension is heads."""
        return {"output_scale": (heads, dim)}

    @classmethod
    def rule_inputs(
        cls, query: Tensor, key: Tensor, projected: Mapping[str, Tensor], weights: Mapping[str, Tensor], turn: Turn
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The rule's query [.., H, D], key [.., HK, D], decay [.., H, D or 1] and beta [.., H] or None, the last two in at least float32.

        Args:
            query, key: Before RoPE.
            projected: Results of `projections`, [.., H * size].
        """
        raise NotImplementedError

    @classmethod
    def op_inputs(
        cls,
        heads: tuple[Tensor, Tensor, Tensor],
        projected: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        turn: Turn,
    ) -> dict[str, Tensor | None]:
        """Tensors of the op, [.., heads, ..]; the arguments: see `rule_inputs`, with values [.., HK, D]."""
        value = heads[2]
        query, key, decay, beta = cls.rule_inputs(*heads[:2], projected, weights, turn)
        query, key = query.to(value.dtype), key.to(value.dtype)
        value = value.repeat_interleave(query.shape[-2] // value.shape[-2], dim=-2)
        return {"query": query[..., None, :], "key": key, "value": value, "decay": decay, "beta": beta}

    @staticmethod
    def normed(output: Tensor) -> Tensor:
        """The rule's outputs [.., H, D] divided by their root mean square, in at least float32."""
        rows = output.to(torch.promote_types(output.dtype, torch.float32))
        return rows * torch.rsqrt((rows * rows).mean(-1, keepdim=True) + NORM_EPSILON)

    @staticmethod
    def gated(rows: Tensor, projected: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
        """`normed` outputs, scaled and gated, in the gates' type."""
        gate = silu(projected["z_proj"]).unflatten(-1, rows.shape[-2:])
        return (rows * weights["output_scale"] * gate).to(gate.dtype)

    def initial(self, name: str) -> Tensor:
        parameter = self.get_parameter(name)
        if name == "z_proj.bias":
            return torch.full(parameter.shape, OPEN_GATE, dtype=parameter.dtype)
        fill = torch.ones if name == "output_scale" else torch.zeros
        return fill(parameter.shape, dtype=parameter.dtype)

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        projected, weights = self._own_outputs(hidden)
        rows = self.mixed(hidden, projected, weights, position_embeddings, past_key_values)
        return self.o_proj(self.gated(rows, projected, weights).flatten(2))

    def mixed(
        self,
        hidden: Tensor,
        projected: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        position_embeddings: tuple[Tensor, Tensor] | None,
        past_key_values: Any,
    ) -> Tensor:
        """`normed` outputs [B, T, H, D]; `projected` and `weights` (see `rule_inputs`)."""

        def turn(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            return self.turned(query, key, position_embeddings)

        parts = self.op_inputs(self.heads(hidden), projected, weights, turn)
        with maybe_autocast(hidden.device.type, enabled=False):  # the kernel chooses its own precision
            inputs = Inputs(**parts, update_rule=self.rule)  # type: ignore[arg-type]
            output = recurrent(inputs, past_key_values, self.layer_idx, self.ops)
            return self.normed(output[:, :, :, 0])

    def _own_outputs(self, hidden: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Outputs of the layer's own projections for `hidden`, and its other parameters."""
        projected = {name: self.get_submodule(name)(hidden) for name in self.projections(self.head_dim)}
        names = self.head_weights(self.num_heads, self.head_dim)
        return projected, {name: self.get_parameter(name) for name in names}


class LinearizedGLA(LinearizedAttention):
    """The gated rule with a decay per key channel, of low rank."""

    rule, per_key = "gated", True
    # So few inputs fit no block of a quantized weight, and would save nothing.
    weight_roles = LinearizedAttention.weight_roles | {"gk_proj.0.weight": GATE, "gk_proj.1.weight": NORM}
    fresh = (*LinearizedAttention.fresh, "gk_proj.")

    @classmethod
    def projections(cls, dim: int) -> dict[str, PagedProjection]:
        return {**super().projections(dim), "gk_proj": PagedProjection(dim, bias=True, low_rank=LOW_RANK)}

    def initial(self, name: str) -> Tensor:
        parameter = self.get_parameter(name)
        if name == "gk_proj.0.weight":  # the one factor that is not zero
            random = torch.Generator().manual_seed(self.layer_idx)
            start = torch.randn(parameter.shape, generator=random) * parameter.shape[1] ** -0.5
            return start.to(parameter.dtype)
        if name == "gk_proj.1.bias":  # channels that RoPE rotates fast represent the near past
            return gate_bias(self.head_dim, torch.ones(self.num_heads)).flatten().to(parameter.dtype)
        return super().initial(name)

    @classmethod
    def rule_inputs(
        cls, query: Tensor, key: Tensor, projected: Mapping[str, Tensor], weights: Mapping[str, Tensor], turn: Turn
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        forget = projected["gk_proj"].unflatten(-1, query.shape[-2:])
        decay = -softplus(-forget.to(torch.promote_types(forget.dtype, torch.float32))) / LOGIT_NORMALIZER
        return *turn(query, key), decay, None


class LinearizedGatedDeltaNet(LinearizedAttention):
    """The gated delta rule; queries and keys are normalized, then rotated by their positions."""

    rule, per_key = "gated_delta", False
    weight_roles = LinearizedAttention.weight_roles | {"a_proj.weight": GATE, "b_proj.weight": GATE}
    fresh = (*LinearizedAttention.fresh, "a_proj.", "b_proj.", "A_log", "dt_bias")

    @classmethod
    def projections(cls, dim: int) -> dict[str, PagedProjection]:
        steps = dict.fromkeys(("a_proj", "b_proj"), PagedProjection(1, bias=False))
        return {**super().projections(dim), **steps}

    @classmethod
    def head_weights(cls, heads: int, dim: int) -> dict[str, tuple[int, ...]]:
        return {**super().head_weights(heads, dim), "A_log": (heads,), "dt_bias": (heads,)}

    def initial(self, name: str) -> Tensor:
        if name == "dt_bias":
            return step_bias(memories(self.num_heads)).to(self.get_parameter(name).dtype)
        return super().initial(name)

    @classmethod
    def rule_inputs(
        cls, query: Tensor, key: Tensor, projected: Mapping[str, Tensor], weights: Mapping[str, Tensor], turn: Turn
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        wide = torch.promote_types(query.dtype, torch.float32)
        query, key = turn(*(unit_length(silu(x.to(wide))) for x in (query, key)))
        steps = softplus(projected["a_proj"][..., None].to(wide) + weights["dt_bias"][..., None].to(wide))
        decay = -weights["A_log"][..., None].to(wide).exp() * steps
        return query, key, decay, projected["b_proj"].to(wide).sigmoid()


def memories(count: int) -> Tensor:
    """Tokens after which `count` fresh memories decay to 1/e, shortest first, [count]."""
    return torch.logspace(math.log10(SHORTEST), math.log10(LONGEST), count)


def step_bias(tokens: Tensor) -> Tensor:
    """`dt_bias` of Gated DeltaNet heads that decay to 1/e after `tokens`, with A_log 0."""
    return torch.expm1(1 / tokens).log()


def gate_bias(dim: int, factors: Tensor) -> Tensor:
    """Bias of GLA's decays [H, D] for fresh memories times `factors` [H]."""
    half = memories(dim // 2).to(factors)
    return -torch.expm1(LOGIT_NORMALIZER / (factors[:, None] * torch.cat((half, half)))).log()
