"""From device to the form of the choice of a token that computes it there."""

from __future__ import annotations

from torch import Tensor

from still_kernels.greedy_token.inputs import Inputs
from still_kernels.greedy_token.naive import naive_greedy_token


def greedy_token(inputs: Inputs) -> Tensor:
    """The likeliest tokens by the fastest form that covers the call; results and errors as of `naive_greedy_token`.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
    """
    if inputs.logits.device.type == "cpu":
        return naive_greedy_token(inputs)
    from still_kernels.greedy_token.launch import triton_greedy_token

    return triton_greedy_token(inputs)
