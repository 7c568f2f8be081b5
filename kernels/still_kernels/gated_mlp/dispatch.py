"""From device to the form of the layer that computes it there."""

from __future__ import annotations

from torch import Tensor

from still_kernels.gated_mlp.inputs import Inputs
from still_kernels.gated_mlp.naive import naive_gated_mlp


def gated_mlp(inputs: Inputs) -> Tensor:
    """The layer by the fastest form that covers the call; results and errors as of `naive_gated_mlp`.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
    """
    if inputs.input.device.type == "cpu":
        return naive_gated_mlp(inputs)
    from still_kernels.gated_mlp.launch import triton_gated_mlp

    return triton_gated_mlp(inputs)
