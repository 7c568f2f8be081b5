"""The RG-LRU of RecurrentGemma, replacing a family's module: the gated rule in each channel by itself, with a state of one number.

Source: arXiv:2402.19427.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStateModule, FixedStatesMixer
from still_export.mixers.roles import GATE, NORM, PROJECTION
from still_kernels.causal_conv.call import causal_conv
from still_kernels.causal_conv.meaning import Inputs as ConvInputs
from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.linear_attention.call import linear_attention
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.spec import LINEAR_ATTENTION

SHARPNESS = 8.0
"""Factor of the decay's logarithm, which no configuration has."""


class RgLru(FixedStateModule):
    """Convolution, gates of blocks of channels, recurrence h = a h + sqrt(1 - a^2) gate x, output gate."""

    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("linear_x.weight", "linear_y.weight", "linear_out.weight"), PROJECTION),
        **dict.fromkeys(("rg_lru.input_gate_weight", "rg_lru.recurrent_gate_weight"), GATE),
        **dict.fromkeys(("rg_lru.input_gate_bias", "rg_lru.recurrent_gate_bias", "conv_1d.weight"), NORM),
    }

    def gates(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (input gate, recurrence gate) of the convolution's output [B, T, channels], both in at least float32."""
        unit, wide = self.rg_lru, torch.promote_types(mixed.dtype, torch.float32)
        blocks = mixed.unflatten(-1, (len(unit.input_gate_weight), -1)).transpose(1, 2)  # [B, blocks, T, channels]
        logits = (
            (blocks @ weight).transpose(1, 2) + bias
            for weight, bias in (
                (unit.input_gate_weight, unit.input_gate_bias),
                (unit.recurrent_gate_weight, unit.recurrent_gate_bias),
            )
        )
        read, forget = (x.flatten(2).to(wide) for x in logits)
        # ONNX Runtime's Sigmoid is exact to 1e-7, of which the square root of 1 - a^2 makes 3e-4.
        return read.sigmoid(), (-softplus(-forget)).exp()

    def forward(self, hidden_states: Tensor, cache: Any, later: Tensor, **kwargs: Any) -> Tensor:
        """`later` [B, T, 1]: false at a sequence's first token, whose input keeps its size."""
        before, new_tokens, layer = self.begin(hidden_states, cache)
        after: dict[str, Tensor] = {}
        taps = ConvInputs(self.linear_x(hidden_states), self.conv_1d.weight, self.conv_1d.bias, new_tokens, "none")
        mixed, after["conv_state"] = causal_conv(taps, before["conv_state"])
        read, forget = self.gates(mixed)
        decay = -SHARPNESS * forget * softplus(self.rg_lru.recurrent_param.to(forget.dtype))
        forgotten = -decay.tanh() * (1 + (2 * decay).exp())  # 1 - a^2, exact for a near 1
        size = torch.where(later, forgotten, 1.0).sqrt()
        one = mixed.new_ones(1, 1, 1, 1).expand(*mixed.shape, 1)
        inputs = Inputs(
            one[:, :, :1, None],
            one[:, :, :1],
            (mixed * read * size).to(mixed.dtype)[..., None],
            decay[..., None],
            new_tokens=new_tokens,
            update_rule="gated",
            scale=1.0,
        )
        output, after["recurrent_state"] = linear_attention(inputs, before["recurrent_state"])
        if layer is not None:
            layer.store(after)
        return self.linear_out(output.flatten(2) * self.act_fn(self.linear_y(hidden_states)))


class RgLruMixer(FixedStatesMixer):
    name = "rg_lru"
    modules: ClassVar[dict[str, type[RgLru]]] = {"RecurrentGemmaRecurrentBlock": RgLru}
    what = "RG-LRU"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        channels = config.lru_width
        return (
            LayerOp(CAUSAL_CONV, {"activation": "none"}, {"C": channels, "P": config.conv1d_width - 1}),
            LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, {"H": channels, "D": 1, "V": 1}),
        )
