"""From device to the form of the rounding that computes it there."""

from __future__ import annotations

from torch import Tensor

from still_kernels.round_key_value.inputs import Inputs
from still_kernels.round_key_value.naive import naive_round_key_value


def round_key_value(inputs: Inputs) -> tuple[Tensor, ...]:
    """Keys and values by the fastest form that covers the call; results and errors as of `naive_round_key_value`.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
    """
    if inputs.key.device.type == "cpu":
        return naive_round_key_value(inputs)
    from still_kernels.round_key_value.launch import triton_round_key_value

    return triton_round_key_value(inputs)
