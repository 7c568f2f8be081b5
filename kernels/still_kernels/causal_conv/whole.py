"""The PyTorch form: all tokens of a call at once, tap by tap."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from still_kernels.causal_conv.inputs import Inputs


def whole_causal_conv(inputs: Inputs, state: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """The causal convolution of new tokens; results and errors as of `naive_causal_conv`, any split of a sequence gives the same.

    Args:
        in_place: Write into `state`, and return it.
    """
    inputs.check(state)
    tokens, past = inputs.input.shape[1], state.shape[2]
    counts = inputs.counts()
    real = (torch.arange(tokens, device=counts.device) < counts[:, None])[..., None]  # [B, T, 1]
    fresh = inputs.input.masked_fill(~real, 0)
    known = torch.cat((state.transpose(1, 2), fresh), dim=1)  # [B, K - 1 + T, C]
    taps = inputs.weight[:, 0].to(inputs.wide)
    total: Tensor | float = 0.0 if inputs.bias is None else inputs.bias.to(inputs.wide)
    for tap in range(past + 1):
        total = total + known[:, tap : tap + tokens].to(inputs.wide) * taps[:, tap]
    assert isinstance(total, Tensor)
    total = silu(total) if inputs.activation == "silu" else total
    place = counts[:, None] + torch.arange(past, device=counts.device)  # the latest K - 1 columns, [B, K - 1]
    present = known.gather(1, place[..., None].expand(-1, -1, known.shape[2])).transpose(1, 2).contiguous()
    output = total.masked_fill(~real, 0).to(inputs.input.dtype)
    return output, state.copy_(present) if in_place else present
