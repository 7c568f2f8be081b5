"""From device to the form of softmax attention that computes it there."""

from __future__ import annotations

from torch import Tensor

from still_kernels.alike import demand_alike
from still_kernels.attention.blocked import blocked_attention
from still_kernels.attention.inputs import Inputs
from still_kernels.attention.state import AttentionState
from still_kernels.forms import has_kernels
from still_kernels.launcher import Bound


def attention(inputs: Inputs, state: AttentionState, in_place: bool = False) -> tuple[Tensor, AttentionState]:
    """Softmax attention with a cache by the fastest form that covers the call; results and errors as of `blocked_attention`.

    On CUDA the Triton kernels, without reading anything back to the host: a sequence that outgrows the state gets NaN outputs there
    instead of an exception. Where gradients are asked for, and on the CPU, the PyTorch form.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
    """
    if not has_kernels(inputs.query.device) or inputs.wants_gradients():
        return blocked_attention(inputs, state, in_place)
    from still_kernels.attention.launch import triton_attention

    demand_alike(inputs.query, state.key)
    return triton_attention(inputs, state, in_place)


def bind_decode(inputs: Inputs, state: AttentionState) -> Bound | None:
    """Launches laid out for decode steps like this one, which write into `state`; None where no kernel reads its tensors as they are.

    Each call brings output, query, key, value, new_tokens and past_length, of these shapes and types.

    Raises:
        UnsupportedError: No kernel covers the layer.
    """
    if not (
        inputs.query.is_cuda
        and inputs.query.shape[1] == 1
        and all(x.is_contiguous() for name, x in state.tensors().items() if name != "length")
    ):
        return None
    from still_kernels.attention import launch

    inputs.check()
    state.check(inputs)
    demand_alike(inputs.query, state.key)
    return launch.bind_decode(inputs.query, state)
