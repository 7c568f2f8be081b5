"""From device to the form of the causal convolution that computes it there."""

from __future__ import annotations

from torch import Tensor

from still_kernels.causal_conv.inputs import Inputs
from still_kernels.causal_conv.whole import whole_causal_conv
from still_kernels.forms import has_kernels


def causal_conv(inputs: Inputs, state: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """The causal convolution by the fastest form that covers the call; results and errors as of `whole_causal_conv`.

    On CUDA the Triton kernels, without reading anything back to the host. Where gradients are asked for, and on the CPU, the PyTorch
    form.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
    """
    if not has_kernels(inputs.input.device) or inputs.wants_gradients():
        return whole_causal_conv(inputs, state, in_place)
    from still_kernels.causal_conv.launch import triton_causal_conv

    return triton_causal_conv(inputs, state, in_place)
