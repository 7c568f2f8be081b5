"""Runs the plan of still::Attention with Triton: which tensors go by which name, and sizes of a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from still_graphs.ops.spec import CACHE
from still_kernels import launcher
from still_kernels.attention.inputs import Inputs
from still_kernels.attention.state import AttentionState
from still_kernels.attention.tiles import tile_table
from still_kernels.attention.variants import KERNELS
from still_kernels.tile import TileTable


def device_table(head_dim: int, device: torch.device, wide: bool) -> TileTable:
    """Block sizes for a device; the interpreter on the CPU uses those of sm_90."""
    return tile_table(launcher.arch_of(device), head_dim, wide)


_prepared = launcher.kept(KERNELS)


def _kind(query: Tensor, state: AttentionState) -> tuple[Any, ...]:
    """What the launches of a call follow from."""
    sizes = (*zip("BTHD", query.shape, strict=True), ("HK", state.key.shape[1]), ("N", state.rows))
    scales = ("key_scale", "value_scale") if state.cache == "int8" else ()
    return query.dtype, sizes, ((CACHE.name, state.cache),), scales


def launch_attention(inputs: Inputs, state: AttentionState, output: Tensor, table: TileTable | None = None) -> None:
    """Run the kernels on `state`, in place; `state.length` is read and left for the caller to advance.

    Args:
        inputs: Contiguous, with `new_tokens`.
        output: As query.
        table: Block sizes; by default those of the device. With others Triton looks for the compiled kernels at each launch.

    Raises:
        UnsupportedError: No kernel covers the call; the message lists what is covered.
    """
    query = inputs.query
    prepared = _prepared(query.device, table, *_kind(query, state))
    tensors = {**vars(inputs), **_states(state), "output": output, "past_length": state.length}
    launcher.Launcher().run(prepared, tensors, query)


def bind_decode(query: Tensor, state: AttentionState) -> launcher.Bound:
    """Decode steps with such a query [B, 1, H, D] on `state`, in place: output, query, key, value, new_tokens and past_length are those
    of each call."""
    prepared = _prepared(query.device, None, *_kind(query, state))
    names = ("output", "query", "key", "value", "new_tokens", "past_length")
    return launcher.Bound(prepared, query.dtype, _states(state), names)


def _states(state: AttentionState) -> dict[str, Tensor | None]:
    """The states as the kernels call them; words as the codes that they hold."""
    keys, values = (x.view(torch.int8) if x.dtype == torch.int32 else x for x in (state.key, state.value))
    scales = {"key_scale": state.key_scale, "value_scale": state.value_scale}
    return {"present_key": keys, "present_value": values, **scales}


def triton_attention(inputs: Inputs, state: AttentionState, in_place: bool = False) -> tuple[Tensor, AttentionState]:
    """`dispatch.attention` by the Triton kernels, on CUDA; the state's tensors must be contiguous where they are written in place."""
    batch, tokens = inputs.check()
    state.check(inputs)
    query, new_tokens = inputs.query, inputs.new_tokens
    launcher.check_device(query)
    states = {name: launcher.written(x, in_place) for name, x in state.tensors().items() if name != "length"}
    if new_tokens is None:
        new_tokens = torch.full((batch,), tokens, dtype=state.length.dtype, device=query.device)
    length = state.length.contiguous()
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    given = (x.contiguous() for x in (query, inputs.key, inputs.value, new_tokens))
    launch_attention(Inputs(*given), AttentionState(**states, length=length), output)
    return output, AttentionState(**states, length=length + new_tokens.to(length.dtype))
