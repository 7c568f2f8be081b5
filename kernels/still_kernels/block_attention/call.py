"""Calls of still::BlockAttention: choice of implementation, and launch of the Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from still_graphs.errors import UnsupportedError
from still_kernels import launcher
from still_kernels.attention.meaning import AttentionState, op_of_keys
from still_kernels.block_attention.meaning import Inputs
from still_kernels.block_attention.meaning import block_attention as naive_block_attention
from still_kernels.block_attention.plan import KERNELS
from still_kernels.block_attention.spec import BLOCK_ATTENTION
from still_kernels.forms import has_kernels
from still_kernels.sizes import tensors_of
from still_kernels.tile import TileTable

_prepared = launcher.cached_launches(KERNELS)


def launch_block_attention(
    inputs: Inputs, state: AttentionState, output: Tensor, table: TileTable | None = None
) -> None:
    """Run the kernels on `state`, in place. `state.length` is read only; the caller advances it. Nothing is read back to the host.

    Args:
        inputs: Contiguous, with `new_tokens`.
        output: Like query.
    """
    query, blocks = inputs.query, inputs.blocks
    assert blocks is not None
    shape = zip("BTHD", query.shape, strict=True)
    sizes = (*shape, ("HK", inputs.key.shape[2]), ("N", state.rows), ("S", blocks.shape[3]))
    prepared = _prepared(query.device, table, query.dtype, sizes, (("block_size", inputs.block_size),))
    states = {"present_key": state.key, "present_value": state.value, "past_length": state.length}
    launcher.Launcher().run(prepared, {**tensors_of(inputs), **states, "output": output}, query)


@op_of_keys(BLOCK_ATTENTION, Inputs)
def block_attention(inputs: Inputs, state: AttentionState, in_place: bool = False) -> tuple[Tensor, AttentionState]:
    """Like `meaning.block_attention`. The Triton kernels run on CUDA if they cover the call and no gradients are required. They read
    nothing back to the host, so a sequence that outgrows the state is no error there."""
    query, blocks, new_tokens = inputs.query, inputs.blocks, inputs.new_tokens
    if (
        not has_kernels(query.device)
        or inputs.needs_gradients()
        or new_tokens is None
        or state.key.dtype != query.dtype
    ):
        return naive_block_attention(inputs, state, in_place)
    inputs.check()
    state.check(inputs)
    assert blocks is not None
    cache = {name: launcher.written(getattr(state, name), in_place) for name in ("key", "value")}
    length = state.length.contiguous()
    query, key, value, new_tokens = (x.contiguous() for x in (query, inputs.key, inputs.value, new_tokens))
    call = Inputs(query, key, value, new_tokens, blocks.to(torch.int32).contiguous(), inputs.block_size)
    output = torch.empty_like(query)
    try:
        launch_block_attention(call, AttentionState(**cache, length=length), output)
    except UnsupportedError:
        return naive_block_attention(inputs, state, in_place)
    return output, AttentionState(**cache, length=length + new_tokens.to(length.dtype))
