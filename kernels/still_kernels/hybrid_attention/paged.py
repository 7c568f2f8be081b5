"""Hybrid attention on states in the pages of a serving engine, which are not cleared. States are updated in place."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.hybrid_attention.call import as_read, demand_kernel
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.chunked import chunked_hybrid_attention
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.hybrid_attention.narrow import narrowed, widened
from still_kernels.hybrid_attention.pages import SALIENT, Pages
from still_kernels.packing import PagedStates

LINEAR = ("kv_state", "kv_rest")
GROWING = (*SALIENT, *(f"{name}_scale" for name in SALIENT))


def hybrid_attention_paged(inputs: Inputs, config: HybridAttentionConfig, paged: PagedStates, output: Tensor) -> None:
    """Hybrid attention of packed sequences whose states are in pages.

    On CUDA nothing is read back to the host, and no state is copied. On CPUs rows are gathered, computed in chunks and written back.

    Args:
        inputs: Tokens [tokens, H or HK, D] of these rows and of others.
        paged: Their states.
        output: [tokens, H, D], contiguous, written at the rows' tokens.

    Raises:
        UnsupportedError: No kernel covers the layer on its device.
        CapacityError: On CPUs: a row outgrows the salient cache with overflow="error"; on CUDA its output is NaN.
        ShapeError: The memory does not match `Pages`.
    """
    pages = paged.packing.pages
    assert isinstance(pages, Pages)
    _check_memory(paged.memory, pages)
    if inputs.query.device.type == "cpu":
        _in_chunks(inputs, config, pages, paged, output)
        return
    from still_kernels.hybrid_attention.launch import launch_hybrid_attention

    demand_kernel(config, inputs.query.dtype, inputs.query.device)
    views = pages.views(paged.memory)
    views.pop("kv_rest", None)  # kernels find it after S
    state = HybridAttentionState(**views, length=paged.length)
    copied = as_read(inputs)  # heads come as slices of one projection
    launch_hybrid_attention(copied, config, state, output, paged.packing)


def _check_memory(memory: Tensor, pages: Pages) -> None:
    """Raise ShapeError if the memory does not match; kernels compute addresses from the bytes of a page."""
    apart = (
        memory.stride(0) if len(memory) > 1 else pages.size_bytes
    )  # PyTorch sets the stride of a single row arbitrarily
    if memory.dtype != torch.int8 or memory.stride(1) != 1 or apart != pages.size_bytes:
        raise ShapeError(
            f"memory {memory.dtype} {list(memory.shape)} has strides {memory.stride()}; expected int8, pages {pages.size_bytes} bytes "
            "apart, the bytes of each side by side."
        )


def _in_chunks(inputs: Inputs, config: HybridAttentionConfig, pages: Pages, paged: PagedStates, output: Tensor) -> None:
    packing, views = paged.packing, pages.views(paged.memory)
    counts = packing.query_start.diff().long()
    live = counts > 0
    if not bool(live.any()):
        return
    counts, start = counts[live], packing.query_start[:-1][live].long()
    table, length = packing.state_row[live].long(), paged.length[live].long()
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
    filled, after = (
        torch.tensor([min(pages.slots, config.slots_for(n)) for n in x.tolist()]) for x in (length, length + counts)
    )
    # A growing cache has the slots that the call may fill; this row owns those that it has filled.
    slots = pages.slots if config.overflow != "error" else int(after.max())
    states = {}
    for name in views:
        own = _gathered(name, views[name], table, pages, slots)
        mine = (length > 0)[:, None]
        if name.startswith("salient_"):
            own = own[:, :, :slots]
            mine = mine & (torch.arange(slots) < filled[:, None])
        states[name] = torch.where(mine.view(len(table), 1, -1, *[1] * (own.dim() - 3)), own, 0)
    if pages.rest:
        states["kv_state"] = widened(states["kv_state"], states.pop("kv_rest"))
    result, present = chunked_hybrid_attention(padded, config, HybridAttentionState(**states, length=length))
    output[place[real]] = result[real]
    tensors = present.tensors()
    del tensors["length"]
    if pages.rest:
        tensors["kv_state"], tensors["kv_rest"] = narrowed(tensors["kv_state"])
    for name, tensor in tensors.items():
        _scatter(name, tensor, views[name], table, pages, after)


def _columns(name: str, pages: Pages, slots: int) -> slice:
    """Table columns of a state's pages, for `slots` salient slots."""
    if name in LINEAR:
        return slice(1, pages.first)
    if name in GROWING:
        return slice(pages.first + name.startswith("salient_value"), pages.count(slots), 2)
    return slice(0, 1)


def _gathered(name: str, view: Tensor, table: Tensor, pages: Pages, slots: int) -> Tensor:
    """A contiguous copy of a state of the table's rows, [B, heads, ...]; whole pages of the salient cache."""
    parts = view[table[:, _columns(name, pages, slots)]]  # [B, pages, ...]
    if name in LINEAR:
        return parts.flatten(1, 2)[:, : pages.config.num_heads]
    return parts.transpose(1, 2).flatten(2, 3) if name in GROWING else parts[:, 0]


def _scatter(name: str, tensor: Tensor, view: Tensor, table: Tensor, pages: Pages, after: Tensor) -> None:
    """Write a state [B, heads, ...] back into the rows' own pages, with `after` slots filled."""
    chosen = table[:, _columns(name, pages, tensor.shape[2])]
    if name in LINEAR:
        for i in range(chosen.shape[1]):
            heads = tensor[:, i * pages.heads : (i + 1) * pages.heads]
            view[chosen[:, i], : heads.shape[1]] = heads
    elif name in GROWING:
        for i in range(chosen.shape[1]):
            first = i * pages.rows
            owners = after > first  # after its own pages a row's table has others'
            some = tensor[owners, :, first : first + pages.rows]
            view[chosen[owners, i], :, : some.shape[2]] = some
    else:
        view[chosen[:, 0]] = tensor
