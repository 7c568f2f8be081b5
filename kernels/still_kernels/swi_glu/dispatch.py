"""From device to the form of the gate that computes it there."""

from __future__ import annotations

from torch import Tensor

from still_kernels.swi_glu.inputs import Inputs
from still_kernels.swi_glu.naive import naive_swi_glu


def swi_glu(inputs: Inputs) -> Tensor:
    """The gated numbers by the fastest form that covers the call; results and errors as of `naive_swi_glu`.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
    """
    if inputs.input.device.type == "cpu":
        return naive_swi_glu(inputs)
    from still_kernels.swi_glu.launch import triton_swi_glu

    return triton_swi_glu(inputs)
