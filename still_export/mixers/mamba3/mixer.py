"""Mamba-3, replacing a family's module.

Its state h := a h + b a k' v'^T + g k v^T is read after each token; primes mark the previous token. Without the token's own term it is
S := a (S + (g' + b) k' v'^T), the gated rule on the previous token, and h^T q = S^T q + g (q k) v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStateModule, FixedStatesMixer
from still_export.mixers.roles import NORM, PROJECTION
from still_kernels.angle_sum.meaning import Inputs as AngleInputs
from still_kernels.angle_sum.meaning import angle_sum
from still_kernels.angle_sum.spec import ANGLE_SUM
from still_kernels.causal_conv.call import causal_conv
from still_kernels.causal_conv.meaning import Inputs as ConvInputs
from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.linear_attention.call import linear_attention
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.spec import LINEAR_ATTENTION


class Mamba3(FixedStateModule):
    """The recurrence with its projections, norms of B and C, rotations, skip and gate."""

    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("in_proj.weight", "out_proj.weight"), PROJECTION),
        **dict.fromkeys(("B_bias", "C_bias"), NORM),
    }

    def __init__(self, base: Any, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, ops)
        self.sizes, self.least, self.normed = base.sizes, base.least, base.normed

    def forward(self, hidden_states: Tensor, cache_params: Any = None, **kwargs: Any) -> Tensor:
        before, new_tokens, layer = self.begin(hidden_states, cache_params)
        after: dict[str, Tensor] = {}
        heads, size, groups, dim, angles = self.sizes
        inner, keys = heads * size, groups * dim
        parts = (inner, inner, keys, keys, heads, heads, heads, angles)
        gate, value, key, query, step, rate, share, angle = self.in_proj(hidden_states).split(parts, dim=-1)
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        step = softplus(step.to(wide) + self.dt_bias.to(wide))
        decay = -softplus(rate.to(wide)).clamp_min(self.least) * step  # [B, T, H]
        share = share.to(wide).sigmoid()
        own, past = share * step, (1 - share) * step
        turn, after["angle_state"] = angle_sum(AngleInputs(angle, step, new_tokens), before["angle_state"])
        key, query = (
            self.turned(norm(x.unflatten(-1, (groups, dim))), bias, turn)
            for x, norm, bias in ((key, self.B_norm, self.B_bias), (query, self.C_norm, self.C_bias))
        )
        value = value.unflatten(-1, (heads, size))
        # The previous token, from a convolution's state.
        mixed = torch.cat((key.flatten(2), value.flatten(2), own.to(key.dtype)), -1)
        taps = torch.tensor([1.0, 0.0], dtype=mixed.dtype, device=mixed.device).expand(mixed.shape[-1], 1, 2)
        mixed, after["conv_state"] = causal_conv(
            ConvInputs(mixed, taps, None, new_tokens, "none"), before["conv_state"]
        )
        last_key, last_value, last = mixed.split((heads * dim, inner, heads), dim=-1)
        weight = (decay.exp() * (last.to(wide) + past))[..., None]
        inputs = Inputs(
            query.unsqueeze(3),
            last_key.unflatten(-1, (heads, dim)),
            (weight * last_value.unflatten(-1, (heads, size)).to(wide)).to(value.dtype),
            decay[..., None],
            new_tokens=new_tokens,
            update_rule="gated",
            scale=1.0,
        )
        output, after["recurrent_state"] = linear_attention(inputs, before["recurrent_state"])
        if layer is not None:
            layer.store(after)
        current = own * (query.to(wide) * key.to(wide)).sum(-1) + self.D.to(wide)
        rows = output.flatten(2, 3).to(wide) + current[..., None] * value.to(wide)  # [B, T, H, V]
        if self.normed:
            rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.norm.variance_epsilon)
            rows = rows * self.norm.weight.to(wide).unflatten(0, (heads, size))
        rows = rows.flatten(2) * silu(gate.to(wide))
        return self.out_proj(rows.to(hidden_states.dtype))

    def turned(self, x: Tensor, bias: Tensor, turn: Tensor) -> Tensor:
        """Repeat [B, T, groups, D] for heads [B, T, H, D], add `bias` [H, 1, D], and rotate the first pairs of neighbouring channels by
        `turn` [B, T, H, A]."""
        heads, count = turn.shape[2:]
        rows = x.repeat_interleave(heads // x.shape[2], dim=2).to(turn.dtype) + bias[:, 0].to(turn.dtype)
        first, second = rows[..., : 2 * count].unflatten(-1, (count, 2)).unbind(-1)
        cos, sin = turn.cos(), turn.sin()
        pairs = torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)
        return torch.cat((pairs, rows[..., 2 * count :]), -1).to(x.dtype)


class Mamba3Mixer(FixedStatesMixer):
    name = "mamba3"
    modules, what = {"Mamba3Weights": Mamba3}, "Mamba-3"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        heads, dim, size = config.num_attention_heads, config.state_size, config.head_dim
        return (
            LayerOp(ANGLE_SUM, {}, {"H": heads, "A": config.angles}),
            LayerOp(CAUSAL_CONV, {"activation": "none"}, {"C": heads * (dim + size + 1), "P": 1}),
            LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, {"H": heads, "D": dim, "V": size}),
        )
