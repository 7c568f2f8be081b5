"""From device to the form of a product with two thin matrices that computes it there."""

from __future__ import annotations

from torch import Tensor

from still_kernels.low_rank_matmul.inputs import Inputs
from still_kernels.low_rank_matmul.naive import naive_low_rank_matmul


def low_rank_matmul(inputs: Inputs) -> Tensor:
    """The product by the fastest form that covers the call; results and errors as of `naive_low_rank_matmul`.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
    """
    if inputs.input.device.type == "cpu":
        return naive_low_rank_matmul(inputs)
    from still_kernels.low_rank_matmul.launch import triton_low_rank_matmul

    return triton_low_rank_matmul(inputs)
