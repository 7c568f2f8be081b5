"""Mamba, replacing a family's module. C, B and x times the step are query, key and value; the step controls the decay per key channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStateModule, FixedStatesMixer, demand_silu, sizes_of
from still_export.mixers.projections import repeated
from still_export.mixers.roles import GATE, NORM, PROJECTION
from still_kernels.causal_conv.call import causal_conv
from still_kernels.causal_conv.meaning import Inputs as ConvInputs
from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.linear_attention.call import linear_attention
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.spec import LINEAR_ATTENTION


class Mamba(FixedStateModule):
    """The recurrence with its projections, convolution, skip, gate and optional norms."""

    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("in_proj.weight", "x_proj.weight", "out_proj.weight"), PROJECTION),
        "dt_proj.weight": GATE,
        **dict.fromkeys(("conv1d.weight", "A_log"), NORM),
    }

    def __init__(self, base: Any, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, ops)
        demand_silu(base)
        self.sizes: tuple[int, int, int] = (base.time_step_rank, base.ssm_state_size, base.ssm_state_size)
        self.norms = ("dt_layernorm", "b_layernorm", "c_layernorm") if hasattr(base, "dt_layernorm") else ()
        for name in self.norms:
            getattr(self, name)._buffers.clear()  # ones that Falcon-Mamba's norms do not read

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (input of the convolution, gate), [B, T, channels] each."""
        mixed, gate = self.in_proj(hidden).chunk(2, dim=-1)
        return mixed, gate

    def parts(self, mixed: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns (x and the step before its softplus [B, T, channels], B [B, T, groups, D], C [B, T, groups, 1, D]) from the convolution's
        output `mixed` and the layer's input `hidden`."""
        parts = self.x_proj(mixed).split(self.sizes, dim=-1)
        if self.norms:
            parts = [getattr(self, name)(part) for name, part in zip(self.norms, parts, strict=True)]
        step, key, query = parts
        return mixed, self.dt_proj(step), key[:, :, None], query[:, :, None, None]

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        states, new_tokens, layer = self.begin(hidden_states, cache_params)
        mixed, gate = self.project(hidden_states)
        taps = ConvInputs(mixed, self.conv1d.weight, self.conv1d.bias, new_tokens, "silu")
        mixed, columns = causal_conv(taps, states["conv_state"])
        mixed, step, key, query = self.parts(mixed, hidden_states)
        wide = torch.promote_types(mixed.dtype, torch.float32)
        step, x = softplus(step.to(wide)), mixed.to(wide)
        inputs = Inputs(
            query,
            key,
            (step * x).to(mixed.dtype)[..., None],
            -self.A_log.to(wide).exp() * step[..., None],
            new_tokens=new_tokens,
            update_rule="gated",
            scale=1.0,
        )
        output, recurrent = linear_attention(inputs, states["recurrent_state"])
        if layer is not None:
            layer.store({"conv_state": columns, "recurrent_state": recurrent})
        rows = (output.flatten(2).to(wide) + self.D.to(wide) * x) * silu(gate.to(wide))
        return self.out_proj(rows.to(hidden_states.dtype))


class SharedMamba(Mamba):
    """Mamba-in-Llama: x, B and C come from an attention's values, keys and queries, in groups of D channels. Several groups of C share one
    of x and B. The step's bias is added twice, as in training. x is repeated before the convolution or after it.
    """

    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            (f"{name}.weight" for name in ("in_proj_x", "in_proj_z", "B_proj", "C_proj", "out_proj")), PROJECTION
        ),
        **dict.fromkeys(("dt_proj_down.weight", "dt_proj.weight"), GATE),
        **dict.fromkeys(("conv1d.weight", "A_log"), NORM),
    }

    def __init__(self, base: Any, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, ops)
        self.heads, self.shared, self.repeat_first = base.heads, base.shared, base.repeat_first

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.in_proj_x(hidden)
        return repeated(x, self.shared, self.heads) if self.repeat_first else x, self.in_proj_z(hidden)

    def parts(self, mixed: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = mixed if self.repeat_first else repeated(mixed, self.shared, self.heads)
        step = self.dt_proj(self.dt_proj_down(hidden)) + self.dt_proj.bias
        key = self.B_proj(hidden).unflatten(-1, (self.shared, -1))
        return x, step, key, self.C_proj(hidden).unflatten(-1, (self.heads, 1, -1))


MODULES: dict[str, type[Mamba]] = {
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"), Mamba),
    "InLlamaMamba": SharedMamba,
}


_NAMES = {
    "channels": ("mamba_inner", "intermediate_size"),
    "mixed": ("mamba_mixed", "mamba_inner", "intermediate_size"),
    "dim": ("mamba_d_state", "state_size"),
    "taps": ("mamba_d_conv", "conv_kernel"),
}
"""Names of the sizes in hybrid families and in Mamba; "mixed" channels go through the convolution."""


class MambaMixer(FixedStatesMixer):
    name = "mamba"
    modules, what = MODULES, "Mamba"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        sizes = sizes_of(config, _NAMES)
        heads = {"H": sizes["channels"], "D": sizes["dim"], "V": 1}
        return (
            LayerOp(CAUSAL_CONV, {"activation": "silu"}, {"C": sizes["mixed"], "P": sizes["taps"] - 1}),
            LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, heads),
        )
