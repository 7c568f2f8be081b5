"""The traced form of softmax attention: the torch op `still::attention`, its schema made from the OpSpec."""

from __future__ import annotations

import torch
from torch import Tensor

from still_export.mixers.torch_ops import torch_schema
from still_graphs.ops.attention import ATTENTION
from still_kernels.attention import AttentionState
from still_kernels.attention.dispatch import attention as kernel

_LIBRARY = torch.library.Library(ATTENTION.domain, "FRAGMENT")
_LIBRARY.define(torch_schema(ATTENTION))


def _eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    new_tokens: Tensor,
    past_length: Tensor,
    past_key: Tensor,
    past_value: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    output, present = kernel(query, key, value, AttentionState(past_key, past_value, past_length), new_tokens)
    return output.contiguous(), present.key.contiguous(), present.value.contiguous()


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    new_tokens: Tensor,
    past_length: Tensor,
    past_key: Tensor,
    past_value: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), past_key.new_empty(past_key.shape), past_value.new_empty(past_value.shape)


_LIBRARY.impl(ATTENTION.torch_name, _eager, "CompositeExplicitAutograd")
torch.library.register_fake(f"{ATTENTION.domain}::{ATTENTION.torch_name}", _fake)


def attention(
    query: Tensor, key: Tensor, value: Tensor, state: AttentionState, new_tokens: Tensor
) -> tuple[Tensor, AttentionState]:
    """Call `torch.ops.still.attention`: traceable as one node, differentiable, right on every device.

    Args:
        query, key, value, state, new_tokens: As of `still_kernels.attention.blocked_attention`.

    Returns:
        output [B, T, H, D] and the state after the call.
    """
    output, keys, values = torch.ops.still.attention(
        query, key, value, new_tokens, state.length, state.key, state.value
    )
    return output, AttentionState(keys, values, state.length + new_tokens)
