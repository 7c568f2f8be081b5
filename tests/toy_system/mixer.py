"""The layers: sums of values and of ones are the state of still::LinearAttention, their quotient is the mean."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStateModule, FixedStatesMixer
from still_export.mixers.roles import PROJECTION
from still_kernels.linear_attention.call import linear_attention
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.spec import LINEAR_ATTENTION


class RunningMean(FixedStateModule):
    """The value and output projections of the module that it replaces, and the mean between them."""

    weight_roles: ClassVar[dict[str, str]] = dict.fromkeys(("v_proj.weight", "o_proj.weight"), PROJECTION)

    def forward(self, hidden_states: Tensor, past_key_values: Any = None, **kwargs: Any) -> tuple[Tensor, None]:
        """The call of a decoder layer, hidden states [B, T, C]."""
        before, new_tokens, layer = self.begin(hidden_states, past_key_values)
        value = self.v_proj(hidden_states)
        one = torch.ones_like(value[:, :, :1])
        written = torch.cat((value, one), -1)[:, :, None]  # one head of C + 1 channels
        inputs = Inputs(
            one[:, :, None, None], one[:, :, None], written, new_tokens=new_tokens, update_rule="linear", scale=1.0
        )
        output, state = linear_attention(inputs, before["recurrent_state"])
        if layer is not None:
            layer.store({"recurrent_state": state})
        sums = output[:, :, 0, 0]
        return self.o_proj(sums[..., :-1] / sums[..., -1:].clamp_min(1)), None  # padding has no ones


class RunningMeanMixer(FixedStatesMixer):
    """Layers of type "running_mean"."""

    name = "running_mean"
    modules, what = {"LlamaAttention": RunningMean}, "running mean"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        sizes = {"H": 1, "D": 1, "V": config.hidden_size + 1}
        return (LayerOp(LINEAR_ATTENTION, {"update_rule": "linear", "scale": 1.0}, sizes),)


MIXERS = (RunningMeanMixer(),)
