"""The definition: where the largest number is. Readable, not fast."""

from __future__ import annotations

import torch
from torch import Tensor

from still_kernels.greedy_token.inputs import Inputs


def naive_greedy_token(inputs: Inputs) -> Tensor:
    """The first of the likeliest tokens.

    Returns:
        [B, T], int32.

    Raises:
        ShapeError: The logits do not fit.
    """
    inputs.check()
    largest = inputs.logits.amax(-1, keepdim=True)
    return (inputs.logits == largest).int().argmax(-1).to(torch.int32)
