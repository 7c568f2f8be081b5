"""The definition: one token after the other. Readable, not fast."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from still_kernels.causal_conv.inputs import Inputs


def naive_causal_conv(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted sum of each channel's latest K tokens, in at least float32, then bias and activation.

    Args:
        state: The latest K - 1 tokens that the sequences have seen, oldest first, [B, C, K - 1].

    Returns:
        output [B, T, C], dtype of input, 0 at padding, which enters nothing; and the state after the call.

    Raises:
        ShapeError: A tensor does not fit.
    """
    inputs.check(state)
    output = torch.zeros_like(inputs.input)
    present = state.clone()
    bias = 0 if inputs.bias is None else inputs.bias.to(inputs.wide)
    for row, count in enumerate(inputs.counts().tolist()):
        for t in range(count):
            latest = torch.cat((present[row], inputs.input[row, t, :, None]), dim=1)  # [C, K]
            sums = (latest.to(inputs.wide) * inputs.weight[:, 0].to(inputs.wide)).sum(1) + bias
            output[row, t] = (silu(sums) if inputs.activation == "silu" else sums).to(output.dtype)
            present[row] = latest[:, 1:]
    return output, present
