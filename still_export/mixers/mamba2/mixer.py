"""Mamba-2, replacing a family's module. C, B and x are query, key and value; the step controls the decay and scales x."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStateModule, FixedStatesMixer, class_for, demand_silu, sizes_of
from still_export.mixers.projections import repeated
from still_export.mixers.roles import NORM, PROJECTION
from still_kernels.causal_conv.call import causal_conv
from still_kernels.causal_conv.meaning import Inputs as ConvInputs
from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.linear_attention.call import linear_attention
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.spec import LINEAR_ATTENTION


class Mamba2(FixedStateModule):
    """The recurrence with its projections, convolution, skip and gated norm."""

    weight_roles: ClassVar[dict[str, str]] = {
        "in_proj.weight": PROJECTION,
        "out_proj.weight": PROJECTION,
        "conv1d.weight": NORM,
    }

    def __init__(self, base: Any, ops: Sequence[LayerOp], config: Any) -> None:
        super().__init__(base, ops)
        demand_silu(base)
        self.heads, self.groups = base.num_heads, base.n_groups
        self.dim, self.size = base.ssm_state_size, base.head_dim
        # transformers clamps Nemotron-H by another field (#48989); Zamba2's published one is null.
        limits = getattr(config, "time_step_limit", None) or base.time_step_limit
        self.limits = tuple(None if x is None or math.isinf(x) else x for x in limits)
        """The least and the largest step; None: no bound, because TensorRT does not accept infinity."""

    def project(self, hidden: Tensor) -> Tensor:
        """Gate, x, B, C and step, concatenated, [B, T, channels]."""
        return self.in_proj(hidden)

    def parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, channels], B [B, T, groups, D] and C [B, T, groups, 1, D] from the convolution's output."""
        keys = self.groups * self.dim
        channels, key, query = mixed.split((self.heads * self.size, keys, keys), dim=-1)
        return channels, key.unflatten(-1, (self.groups, self.dim)), query.unflatten(-1, (self.groups, 1, self.dim))

    def normed(self, rows: Tensor, gate: Tensor) -> Tensor:
        """Input of the output projection, from the recurrence's outputs and silu of the gate, in groups of the norm [B, T, groups, C], both
        in at least float32."""
        rows = rows * gate
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.norm.variance_epsilon)
        return self.norm.weight.unflatten(0, (self.groups, -1)).to(rows.dtype) * rows

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        states, new_tokens, layer = self.begin(hidden_states, cache_params)
        widths = (self.heads * self.size, self.conv1d.weight.shape[0], self.heads)
        gate, mixed, step = self.project(hidden_states).split(widths, dim=-1)
        taps = ConvInputs(mixed, self.conv1d.weight, self.conv1d.bias, new_tokens, "silu")
        mixed, columns = causal_conv(taps, states["conv_state"])
        channels, key, query = self.parts(mixed)
        x = channels.unflatten(-1, (self.heads, self.size))
        wide = torch.promote_types(x.dtype, torch.float32)
        step = softplus((step.to(wide) + self.dt_bias.to(wide))[..., None])
        # Within its limits in every call, as transformers has it in a whole forward; its single steps leave them out.
        if self.limits != (0.0, None):
            step = step.clamp(*self.limits)
        inputs = Inputs(
            query,
            key,
            (step * x.to(wide)).to(x.dtype),
            -self.A_log[:, None].to(wide).exp() * step,
            new_tokens=new_tokens,
            update_rule="gated",
            scale=1.0,
        )
        output, recurrent = linear_attention(inputs, states["recurrent_state"])
        if layer is not None:
            layer.store({"conv_state": columns, "recurrent_state": recurrent})
        # As in transformers, values are not rounded between the recurrence and the output projection.
        output, x, gate = (t.unflatten(-1, (self.groups, -1)).to(wide) for t in (output.flatten(2), channels, gate))
        skip = self.D[:, None].expand(self.heads, self.size).reshape(self.groups, -1)
        rows = self.normed(output + skip.to(wide) * x, silu(gate))
        return self.out_proj(rows.to(hidden_states.dtype).flatten(2))


class FalconH1Mamba2(Mamba2):
    """Falcon-H1: factors of the input and its projections, and an optional norm."""

    def __init__(self, base: Any, ops: Sequence[LayerOp], config: Any) -> None:
        super().__init__(base, ops, config)
        inner, keys = self.heads * self.size, self.groups * self.dim
        self.factor = float(config.ssm_in_multiplier)
        self.factors = tuple(zip((inner, inner, keys, keys, self.heads), config.ssm_multipliers, strict=True))
        self.norms: bool = config.mamba_rms_norm
        self.gate_last: bool = config.mamba_norm_before_gate

    def project(self, hidden: Tensor) -> Tensor:
        factors = torch.cat([hidden.new_full((size,), factor) for size, factor in self.factors])
        return super().project(hidden * self.factor) * factors

    def normed(self, rows: Tensor, gate: Tensor) -> Tensor:
        if not self.norms:
            return rows * gate
        return super().normed(rows, torch.ones_like(gate)) * gate if self.gate_last else super().normed(rows, gate)


class SharedMamba2(Mamba2):
    """Mamba-in-Llama: heads are as wide as keys. x and B come from an attention's values and keys, shared by several heads; they are
    repeated for every head before the convolution or after it.
    """

    def __init__(self, base: Any, ops: Sequence[LayerOp], config: Any) -> None:
        super().__init__(base, ops, config)
        self.shared, self.repeat_first = base.shared, base.repeat_first

    def project(self, hidden: Tensor) -> Tensor:
        projected = super().project(hidden)
        if not self.repeat_first:
            return projected
        inner, own = self.heads * self.dim, self.shared * self.dim
        gate, x, key, rest = projected.split((inner, own, own, inner + self.heads), dim=-1)
        return torch.cat((gate, *(repeated(part, self.shared, self.heads) for part in (x, key)), rest), dim=-1)

    def parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.repeat_first:
            return super().parts(mixed)
        own = self.shared * self.dim
        x, key, query = mixed.split((own, own, self.heads * self.dim), dim=-1)
        heads = query.unflatten(-1, (self.heads, 1, self.dim))
        return repeated(x, self.shared, self.heads), key.unflatten(-1, (self.shared, self.dim)), heads


MODULES: dict[str, type[Mamba2]] = {
    "GraniteMoeHybridMambaLayer": Mamba2,
    "BambaMixer": Mamba2,
    "Mamba2Mixer": Mamba2,
    "NemotronHMamba2Mixer": Mamba2,
    "Zamba2MambaMixer": Mamba2,
    "FalconH1Mixer": FalconH1Mamba2,
    "InLlamaMamba2": SharedMamba2,
}


_NAMES = {
    "heads": ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"),
    "groups": ("mamba_n_groups", "mamba_ngroups", "n_groups"),
    "dim": ("mamba_d_state", "ssm_state_size", "state_size"),
    "size": ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim"),
    "taps": ("mamba_d_conv", "conv_kernel"),
}
"""Names of the sizes in hybrid families, Nemotron-H, Zamba2 and Mamba-2."""


class Mamba2Mixer(FixedStatesMixer):
    name = "mamba2"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        sizes = sizes_of(config, _NAMES)
        heads, dim, size = sizes["heads"], sizes["dim"], sizes["size"]
        channels = heads * size + 2 * sizes["groups"] * dim
        return (
            LayerOp(CAUSAL_CONV, {"activation": "silu"}, {"C": channels, "P": sizes["taps"] - 1}),
            LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, {"H": heads, "D": dim, "V": size}),
        )

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        return class_for(base, MODULES, "Mamba-2")(base, self.ops(config, index), config)
