"""Mamba-2 in the place of a family's module. Its C, B and x are query, key and value; the step decays the state and scales x."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from still_export.mixers.base import LayerOp
from still_export.mixers.causal_conv.op import causal_conv
from still_export.mixers.fixed import FixedStateModule, FixedStatesMixer, class_for, demand_silu
from still_export.mixers.linear_attention.op import linear_attention
from still_export.mixers.roles import NORM, PROJECTION
from still_kernels.causal_conv.meaning import Inputs as ConvInputs
from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.spec import LINEAR_ATTENTION


class Mamba2(FixedStateModule):
    """The recurrence with its projections, convolution, skip and gated norm.

    Args:
        base: The family's module; its submodules and parameters are taken over, not copied.
        ops: Of the layer.
        config: Of the model.

    Raises:
        UnsupportedModelError: `base` has another activation.
    """

    weight_roles: ClassVar[dict[str, str]] = {
        "in_proj.weight": PROJECTION,
        "out_proj.weight": PROJECTION,
        "conv1d.weight": NORM,
    }
    """Of parameters that are no vectors, by name (mixers/roles.py)."""

    def __init__(self, base: Any, ops: Sequence[LayerOp], config: Any) -> None:
        super().__init__(base, ops)
        demand_silu(base)
        self.heads, self.groups = base.num_heads, base.n_groups
        self.dim, self.size = base.ssm_state_size, base.head_dim
        limits = getattr(
            config, "time_step_limit", base.time_step_limit
        )  # transformers clamps Nemotron-H by another field (#48989)
        self.limits = tuple(None if x is None or math.isinf(x) else x for x in limits)
        """The least and the largest step; None: no bound, which TensorRT takes no infinity for."""

    def project(self, hidden: Tensor) -> Tensor:
        """Gate, x, B and C, and the step, side by side, [B, T, channels]."""
        return self.in_proj(hidden)

    def normed(self, rows: Tensor, gate: Tensor) -> Tensor:
        """What is projected, of the recurrence's outputs and silu of the gate, in groups that the norm takes together [B, T, groups, C],
        both in at least float32."""
        rows = rows * gate
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.norm.variance_epsilon)
        return self.norm.weight.unflatten(0, (self.groups, -1)).to(rows.dtype) * rows

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """The call of a transformers decoder layer. `attention_mask` is not used: the cache knows the sequences' new tokens."""
        states, new_tokens, layer = self.begin(hidden_states, cache_params)
        inner, keys = self.heads * self.size, self.groups * self.dim
        gate, mixed, step = self.project(hidden_states).split((inner, inner + 2 * keys, self.heads), dim=-1)
        taps = ConvInputs(mixed, self.conv1d.weight, self.conv1d.bias, new_tokens, "silu")
        mixed, columns = causal_conv(taps, states["conv_state"])
        channels, key, query = mixed.split((inner, keys, keys), dim=-1)
        x = channels.unflatten(-1, (self.heads, self.size))
        step = softplus((step + self.dt_bias)[..., None])
        # Within its limits in every call, as transformers has it in a whole forward; its single steps leave them out.
        if self.limits != (0.0, None):
            step = step.clamp(*self.limits)
        wide = torch.promote_types(x.dtype, torch.float32)
        step = step.to(wide)
        inputs = Inputs(
            query.unflatten(-1, (self.groups, 1, self.dim)),
            key.unflatten(-1, (self.groups, self.dim)),
            (step * x.to(wide)).to(x.dtype),
            -self.A_log[:, None].to(wide).exp() * step,
            new_tokens=new_tokens,
            update_rule="gated",
            scale=1.0,
        )
        output, recurrent = linear_attention(inputs, states["recurrent_state"])
        if layer is not None:
            layer.store({"conv_state": columns, "recurrent_state": recurrent})
        # As transformers has it, nothing is rounded between the recurrence and the projection behind the norm.
        output, x, gate = (t.unflatten(-1, (self.groups, -1)).to(wide) for t in (output.flatten(2), channels, gate))
        skip = self.D[:, None].expand(self.heads, self.size).reshape(self.groups, -1)
        rows = self.normed(output + skip.to(wide) * x, silu(gate))
        return self.out_proj(rows.to(hidden_states.dtype).flatten(2))


class FalconH1Mamba2(Mamba2):
    """Falcon-H1: factors of the input and of what it is projected to, and a norm that may be left out."""

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


MODULES: dict[str, type[Mamba2]] = {
    "GraniteMoeHybridMambaLayer": Mamba2,
    "BambaMixer": Mamba2,
    "Mamba2Mixer": Mamba2,
    "NemotronHMamba2Mixer": Mamba2,
    "FalconH1Mixer": FalconH1Mamba2,
}
"""By the class of transformers that each takes the place of."""


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
