"""Hybrid attention on the states of an engine that serves many requests: rows in pages, which nobody clears, updated in place."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.hybrid_attention.chunked import chunked_hybrid_attention
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.dispatch import demand_kernel, with_contiguous_heads, with_weights_of_tokens
from still_kernels.hybrid_attention.inputs import Inputs
from still_kernels.hybrid_attention.state import HybridAttentionState
from still_kernels.packing import Packing


def hybrid_attention_paged(
    inputs: Inputs, config: HybridAttentionConfig, state: HybridAttentionState, packing: Packing, output: Tensor
) -> None:
    """Hybrid attention of packed sequences whose states lie in pages, one page a row.

    A row of length 0 starts empty, whatever its page holds. On CUDA nothing is read back to the host, and nothing of the states is
    copied; on the CPU rows are gathered, computed by the chunked form and written back.

    Args:
        inputs: Tokens [tokens, H or HK, D], of these rows and of others.
        state: Tensors [pages, ...], each row contiguous; `length` [B] of the call's rows, before the call, which the caller advances.
        packing: With `page_bytes`.
        output: [tokens, H, D], contiguous, written where the rows have tokens.

    Raises:
        UnsupportedError: No kernel covers the layer on its device.
        CapacityError: On the CPU: a row outgrows the salient cache with overflow="error"; on CUDA its output is NaN.
        ShapeError: A tensor is not laid out in pages.
    """
    if inputs.query.device.type == "cpu":
        _in_chunks(inputs, config, state, packing, output)
    else:
        _by_kernels(inputs, config, state, packing, output)


def _by_kernels(
    inputs: Inputs, config: HybridAttentionConfig, state: HybridAttentionState, packing: Packing, output: Tensor
) -> None:
    from still_kernels.hybrid_attention.launch import launch_hybrid_attention

    demand_kernel(config, inputs.query.dtype, inputs.query.device)
    _check_pages(state)
    given = with_contiguous_heads(with_weights_of_tokens(inputs))  # heads come as slices of one projection
    launch_hybrid_attention(given, config, state, output, packing)


def _check_pages(state: HybridAttentionState) -> None:
    """The kernels compute addresses within a row from shapes, and those of rows from one distance for all states."""
    strides = set()
    for name, tensor in state.tensors().items():
        if name != "length" and tensor.numel():
            if len(tensor) > 1:  # PyTorch gives the stride of a single row any value
                strides.add(tensor.stride(0) * tensor.element_size())
            if not tensor[0].is_contiguous():
                raise ShapeError(
                    f"state {name} {list(tensor.shape)} has strides {tensor.stride()}; a row must be contiguous."
                )
    if len(strides) > 1:
        raise ShapeError(f"rows of the states lie {sorted(strides)} bytes apart; expected one distance, that of pages.")


def _in_chunks(
    inputs: Inputs, config: HybridAttentionConfig, state: HybridAttentionState, packing: Packing, output: Tensor
) -> None:
    counts = packing.query_start.diff().long()
    live = counts > 0
    if not bool(live.any()):
        return
    counts, start = counts[live], packing.query_start[:-1][live].long()
    rows, length = packing.state_row[live].long(), state.length[live].long()
    column = torch.arange(int(counts.max()))
    real = column < counts[:, None]
    place = torch.where(real, start[:, None] + column, 0)  # [B, T]
    padded = replace(
        inputs,
        query=inputs.query[place],
        key=inputs.key[place],
        value=inputs.value[place],
        gate=None if inputs.gate is None else inputs.gate[place],
        new_tokens=counts,
    )
    # Of a cache that only grows, the slots that the call may fill; of those, what this row has filled is its own.
    slots, filled = state.slots, length * 0 + state.slots
    if config.overflow == "error":
        slots = min(slots, config.slots_for(int((length + counts).max())))
        filled = torch.tensor([config.slots_for(n) for n in length.tolist()])
    held = {}
    for name, tensor in state.tensors().items():
        if name == "length":
            continue
        salient = name.startswith("salient_")
        own = tensor[rows, :, :slots] if salient else tensor[rows]
        mine = (length > 0)[:, None]
        if salient:
            mine = mine & (torch.arange(slots) < filled[:, None])
        held[name] = torch.where(mine.view(len(rows), 1, -1, *[1] * (own.dim() - 3)), own, 0)
    result, present = chunked_hybrid_attention(padded, config, HybridAttentionState(**held, length=length))
    output[place[real]] = result[real]
    for name, tensor in state.tensors().items():
        if name.startswith("salient_"):
            tensor[rows, :, :slots] = getattr(present, name)
        elif name != "length":
            tensor[rows] = getattr(present, name)
