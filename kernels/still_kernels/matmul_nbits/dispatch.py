"""From device to the form of the product that computes it there."""

from __future__ import annotations

from torch import Tensor

from still_kernels.matmul_nbits.inputs import Inputs
from still_kernels.matmul_nbits.naive import naive_matmul_nbits


def matmul_nbits(inputs: Inputs) -> Tensor:
    """The product by the fastest form that covers the call; results and errors as of `naive_matmul_nbits`.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
    """
    if inputs.input.device.type == "cpu":
        return naive_matmul_nbits(inputs)
    from still_kernels.matmul_nbits.launch import triton_matmul_nbits

    return triton_matmul_nbits(inputs)
