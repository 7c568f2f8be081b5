"""From device to the form of the product that computes it there."""

from __future__ import annotations

from torch import Tensor

from still_kernels.dense_matmul.inputs import Inputs
from still_kernels.dense_matmul.naive import naive_dense_matmul


def dense_matmul(inputs: Inputs) -> Tensor:
    """The product by the fastest form that covers the call; results and errors as of `naive_dense_matmul`.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
    """
    if inputs.input.device.type == "cpu":
        return naive_dense_matmul(inputs)
    from still_kernels.dense_matmul.launch import triton_dense_matmul

    return triton_dense_matmul(inputs)
