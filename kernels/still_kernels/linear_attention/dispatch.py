"""From device to the form of linear attention that computes it there."""

from __future__ import annotations

from torch import Tensor

from still_kernels.linear_attention.chunked import chunked_linear_attention
from still_kernels.linear_attention.inputs import Inputs


def linear_attention(inputs: Inputs, state: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """Linear attention by the fastest form that covers the call; results and errors as of `chunked_linear_attention`.

    On CUDA the Triton kernels, without reading anything back to the host. Where gradients are asked for, and on the CPU, the PyTorch
    form.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
    """
    if inputs.query.device.type == "cpu" or inputs.wants_gradients():
        return chunked_linear_attention(inputs, state, in_place)
    from still_kernels.linear_attention.launch import triton_linear_attention

    return triton_linear_attention(inputs, state, in_place)
