"""From device to the form of softmax attention that computes it there."""

from __future__ import annotations

import torch
from torch import Tensor

from still_kernels.attention.blocked import blocked_attention
from still_kernels.attention.state import AttentionState


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: AttentionState,
    new_tokens: Tensor | None = None,
    in_place: bool = False,
) -> tuple[Tensor, AttentionState]:
    """Softmax attention with a cache by the fastest form that covers the call; arguments and errors as of `blocked_attention`.

    On CUDA the Triton kernels, without reading anything back to the host: a row that outgrows the state gets NaN outputs there
    instead of an exception. Where gradients are asked for, and on the CPU, the PyTorch form.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
    """
    differentiate = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if query.device.type == "cpu" or differentiate:
        return blocked_attention(query, key, value, state, new_tokens, in_place)
    from still_kernels.attention.launch import triton_attention

    return triton_attention(query, key, value, state, new_tokens, in_place)
