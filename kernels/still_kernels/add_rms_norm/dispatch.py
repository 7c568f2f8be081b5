"""From device to the form of the sum and its norm that computes them there."""

from __future__ import annotations

from torch import Tensor

from still_kernels.add_rms_norm.inputs import Inputs
from still_kernels.add_rms_norm.naive import naive_add_rms_norm


def add_rms_norm(inputs: Inputs) -> tuple[Tensor, ...]:
    """Sum and norm by the fastest form that covers the call; results and errors as of `naive_add_rms_norm`.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
    """
    if inputs.input.device.type == "cpu":
        return naive_add_rms_norm(inputs)
    from still_kernels.add_rms_norm.launch import triton_add_rms_norm

    return triton_add_rms_norm(inputs)
