"""The gated delta rule, replacing a family's module: projections, convolution, rule, gated norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStateModule, FixedStatesMixer, demand_silu
from still_export.mixers.projections import unit_length
from still_export.mixers.roles import GATE, NORM, PROJECTION
from still_kernels.causal_conv.call import causal_conv
from still_kernels.causal_conv.meaning import Inputs as ConvInputs
from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.linear_attention.call import linear_attention
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.spec import LINEAR_ATTENTION


class GatedDeltaNet(FixedStateModule):
    """The module of Qwen3.5; others differ in names and order of their projections."""

    output, norm_name = "out_proj", "norm"
    rule = "gated_delta"
    weight_roles: ClassVar[dict[str, str]] = {
        "in_proj_qkv.weight": PROJECTION,
        "in_proj_z.weight": GATE,
        "in_proj_a.weight": GATE,
        "in_proj_b.weight": GATE,
        "out_proj.weight": PROJECTION,
        "conv1d.weight": NORM,
    }

    def __init__(self, base: Any, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, ops)
        demand_silu(base)
        self.heads, self.key_heads, self.dim, self.size = self.sizes(base)

    def sizes(self, base: Any) -> tuple[int, int, int, int]:
        """Heads of values and of keys, sizes of keys and of values."""
        return base.num_v_heads, base.num_k_heads, base.head_k_dim, base.head_v_dim

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Returns (queries, keys and values concatenated [B, T, channels]; output gate [B, T, H * V] or None; input of beta [B, T, H];
        input of the decay or None)."""
        return self.in_proj_qkv(hidden), self.in_proj_z(hidden), self.in_proj_b(hidden), self.in_proj_a(hidden)

    def decay(self, a: Tensor) -> Tensor:
        """Logarithm of the decay, [B, T, H, 1 or D], in at least float32, because exp(A_log) may exceed float16."""
        steps = a[..., None].to(torch.promote_types(a.dtype, torch.float32))
        return -self.A_log[:, None].to(steps.dtype).exp() * softplus(steps + self.dt_bias[:, None])

    def step_size(self, b: Tensor) -> Tensor:
        """beta of the rule."""
        return b.sigmoid()

    def convolved(self, mixed: Tensor, columns: Tensor, new_tokens: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Queries, keys and values after the convolution [B, T, channels], and its state after the call."""
        taps = ConvInputs(mixed, self.conv1d.weight, self.conv1d.bias, new_tokens, "silu")
        mixed, columns = causal_conv(taps, columns)
        keys = self.key_heads * self.dim
        return mixed.split((keys, keys, self.heads * self.size), dim=-1), columns

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        states, new_tokens, layer = self.begin(hidden_states, cache_params)
        mixed, gate, b, a = self.project(hidden_states)
        (query, key, value), columns = self.convolved(mixed, states["conv_state"], new_tokens)
        query, key = (unit_length(x.unflatten(-1, (self.key_heads, self.dim))) for x in (query, key))
        wide = torch.promote_types(b.dtype, torch.float32)
        inputs = Inputs(
            query[:, :, :, None],
            key,
            value.unflatten(-1, (self.heads, self.size)),
            None if a is None else self.decay(a),
            self.step_size(b).to(wide),
            new_tokens,
            self.rule,
        )
        output, recurrent = linear_attention(inputs, states["recurrent_state"])
        if layer is not None:
            layer.store({"conv_state": columns, "recurrent_state": recurrent})
        norm, output = getattr(self, self.norm_name), output[:, :, :, 0]
        normed = norm(output) if gate is None else norm(output, gate.unflatten(-1, (self.heads, self.size)))
        return getattr(self, self.output)(normed.flatten(2))


class Qwen3NextGatedDeltaNet(GatedDeltaNet):
    """Qwen3-Next: projections are grouped by key head."""

    weight_roles: ClassVar[dict[str, str]] = {
        "in_proj_qkvz.weight": PROJECTION,
        "in_proj_ba.weight": GATE,
        "out_proj.weight": PROJECTION,
        "conv1d.weight": NORM,
    }

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        group = self.heads // self.key_heads
        wide = self.in_proj_qkvz(hidden).unflatten(-1, (self.key_heads, -1))
        query, key, value, gate = wide.split((self.dim, self.dim, group * self.size, group * self.size), dim=-1)
        b, a = self.in_proj_ba(hidden).unflatten(-1, (self.key_heads, -1)).split((group, group), dim=-1)
        mixed = torch.cat([x.flatten(2) for x in (query, key, value)], dim=-1)
        return mixed, gate.flatten(2), b.flatten(2), a.flatten(2)


class OlmoHybridGatedDeltaNet(GatedDeltaNet):
    """OLMo-Hybrid: separate projections, and beta up to 2."""

    output, norm_name = "o_proj", "o_norm"
    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"), PROJECTION),
        **dict.fromkeys(("g_proj.weight", "a_proj.weight", "b_proj.weight"), GATE),
        "conv1d.weight": NORM,
    }

    def __init__(self, base: Any, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, ops)
        self.most = 2.0 if base.allow_neg_eigval else 1.0

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        mixed = torch.cat([self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)], dim=-1)
        return mixed, self.g_proj(hidden), self.b_proj(hidden), self.a_proj(hidden)

    def step_size(self, b: Tensor) -> Tensor:
        return self.most * b.sigmoid()


class FlaGatedDeltaNet(OlmoHybridGatedDeltaNet):
    """Gated DeltaNet of flash-linear-attention: like OLMo-Hybrid, with an optional output gate."""

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        mixed = torch.cat([self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)], dim=-1)
        gate = self.g_proj(hidden) if hasattr(self, "g_proj") else None
        return mixed, gate, self.b_proj(hidden), self.of_decay(hidden)

    def of_decay(self, hidden: Tensor) -> Tensor | None:
        """Input of the decay, [B, T, H]."""
        return self.a_proj(hidden)


class FlaDeltaNet(FlaGatedDeltaNet):
    """DeltaNet of flash-linear-attention: the same without a decay."""

    rule = "delta"

    def of_decay(self, hidden: Tensor) -> Tensor | None:
        return None


class KimiDeltaAttention(GatedDeltaNet):
    """Kimi Linear: a decay per key channel, and as many key heads as value heads."""

    output, norm_name = "o_proj", "o_norm"
    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"), PROJECTION),
        **dict.fromkeys(("forget_gate.f_a_proj.weight", "forget_gate.f_b_proj.weight", "b_proj.weight"), GATE),
        **dict.fromkeys(("g_a_proj.weight", "g_b_proj.weight"), GATE),
        **dict.fromkeys(("conv1d.weight", "forget_gate.A_log"), NORM),
    }

    def sizes(self, base: Any) -> tuple[int, int, int, int]:
        return base.num_heads, base.num_heads, base.head_dim, base.head_dim

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        mixed = torch.cat([self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)], dim=-1)
        forget = self.forget_gate.f_b_proj(self.forget_gate.f_a_proj(hidden))
        return mixed, self.g_b_proj(self.g_a_proj(hidden)), self.b_proj(hidden), forget

    def decay(self, a: Tensor) -> Tensor:
        steps = a.unflatten(-1, (self.heads, self.dim)).to(torch.promote_types(a.dtype, torch.float32))
        steps = softplus(steps + self.forget_gate.dt_bias.view(self.heads, self.dim))
        return -self.forget_gate.A_log.to(steps.dtype).exp() * steps


class BailingDeltaAttention(KimiDeltaAttention):
    """Ling: decay and gate from one projection each; the decay is bounded if `lower_bound` is set."""

    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"), PROJECTION),
        **dict.fromkeys(("forget_gate.f_proj.weight", "b_proj.weight", "g_proj.weight"), GATE),
        "conv1d.weight": NORM,
    }

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        mixed = torch.cat([self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)], dim=-1)
        return mixed, self.g_proj(hidden), self.b_proj(hidden), self.forget_gate.f_proj(hidden)

    def decay(self, a: Tensor) -> Tensor:
        gate = self.forget_gate
        steps = a.unflatten(-1, (self.heads, self.dim)).to(torch.promote_types(a.dtype, torch.float32))
        steps = steps + gate.dt_bias.view(self.heads, self.dim)
        rate = gate.A_log.to(steps.dtype).exp()[:, None]
        return gate.lower_bound * (rate * steps).sigmoid() if gate.safe_gate else -rate * softplus(steps)


MODULES: dict[str, type[GatedDeltaNet]] = {
    "Qwen3_5GatedDeltaNet": GatedDeltaNet,
    "Qwen3_5MoeGatedDeltaNet": GatedDeltaNet,
    "LaraMiniGatedDeltaNet": GatedDeltaNet,
    "Qwen3NextGatedDeltaNet": Qwen3NextGatedDeltaNet,
    "OlmoHybridGatedDeltaNet": OlmoHybridGatedDeltaNet,
    "FlaGatedDeltaNet": FlaGatedDeltaNet,
    "FlaDeltaNet": FlaDeltaNet,
    "KimiLinearDeltaAttention": KimiDeltaAttention,
    "BailingHybridDeltaAttention": BailingDeltaAttention,
}


class GatedDeltaNetMixer(FixedStatesMixer):
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
