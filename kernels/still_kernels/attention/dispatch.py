"""From device to the form of softmax attention that computes it there."""

from __future__ import annotations

from torch import Tensor

from still_kernels.alike import demand_alike
from still_kernels.attention.blocked import blocked_attention
from still_kernels.attention.inputs import Inputs
from still_kernels.attention.state import AttentionState


def attention(inputs: Inputs, state: AttentionState, in_place: bool = False) -> tuple[Tensor, AttentionState]:
    """Softmax attention with a cache by the fastest form that covers the call; results and errors as of `blocked_attention`.

    On CUDA the Triton kernels, without reading anything back to the host: a row that outgrows the state gets NaN outputs there
    instead of an exception. Where gradients are asked for, and on the CPU, the PyTorch form.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
    """
    if inputs.query.device.type == "cpu" or inputs.wants_gradients():
        return blocked_attention(inputs, state, in_place)
    from still_kernels.attention.launch import triton_attention

    demand_alike(inputs.query, state.key)
    return triton_attention(inputs, state, in_place)
