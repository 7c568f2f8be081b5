"""From device to the form of the rotation that computes it there."""

from __future__ import annotations

from torch import Tensor

from still_kernels.rotary_qkv.inputs import Inputs
from still_kernels.rotary_qkv.naive import naive_rotary_qkv


def rotary_qkv(inputs: Inputs) -> tuple[Tensor, ...]:
    """The parts by the fastest form that covers the call; results and errors as of `naive_rotary_qkv`.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
    """
    if inputs.input.device.type == "cpu":
        return naive_rotary_qkv(inputs)
    from still_kernels.rotary_qkv.launch import triton_rotary_qkv

    return triton_rotary_qkv(inputs)
