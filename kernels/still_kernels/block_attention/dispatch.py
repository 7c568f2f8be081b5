"""From device to the form of attention to chosen blocks that computes it there."""

from __future__ import annotations

import torch
from torch import Tensor

from still_graphs.errors import UnsupportedError
from still_kernels import launcher
from still_kernels.attention import AttentionState
from still_kernels.block_attention.naive import Inputs
from still_kernels.block_attention.naive import block_attention as naive_block_attention
from still_kernels.forms import has_kernels


def block_attention(inputs: Inputs, state: AttentionState, in_place: bool = False) -> tuple[Tensor, AttentionState]:
    """As of `naive.block_attention`; on CUDA by the Triton kernels, where they cover the call and no gradients are asked for, without
    reading anything back to the host: a sequence that outgrows the state is no error there."""
    query, blocks, new_tokens = inputs.query, inputs.blocks, inputs.new_tokens
    if (
        not has_kernels(query.device)
        or inputs.wants_gradients()
        or new_tokens is None
        or state.key.dtype != query.dtype
    ):
        return naive_block_attention(inputs, state, in_place)
    from still_kernels.block_attention.launch import launch_block_attention

    inputs.check()
    state.check(inputs)
    assert blocks is not None
    kept = {name: launcher.written(getattr(state, name), in_place) for name in ("key", "value")}
    length = state.length.contiguous()
    query, key, value, new_tokens = (x.contiguous() for x in (query, inputs.key, inputs.value, new_tokens))
    call = Inputs(query, key, value, new_tokens, blocks.to(torch.int32).contiguous(), inputs.block_size)
    output = torch.empty_like(query)
    try:
        launch_block_attention(call, AttentionState(**kept, length=length), output)
    except UnsupportedError:
        return naive_block_attention(inputs, state, in_place)
    return output, AttentionState(**kept, length=length + new_tokens.to(length.dtype))
