"""Calls of still::Attention: choice of implementation, and launch of the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from still_graphs.spec import CACHE
from still_kernels import launcher
from still_kernels.alike import demand_alike
from still_kernels.attention.meaning import AttentionState, Inputs, blocked_attention, op_of_keys
from still_kernels.attention.plan import KERNELS
from still_kernels.attention.spec import ATTENTION
from still_kernels.forms import has_kernels
from still_kernels.launcher import Bound
from still_kernels.tile import TileTable

_prepared = launcher.cached_launches(KERNELS)


def _kind(query: Tensor, state: AttentionState) -> tuple[Any, ...]:
    """Key of a call's launches."""
    sizes = (*zip("BTHD", query.shape, strict=True), ("HK", state.key.shape[1]), ("N", state.rows))
    scales = ("key_scale", "value_scale") if state.cache == "int8" else ()
    return query.dtype, sizes, ((CACHE.name, state.cache),), scales


def launch_attention(inputs: Inputs, state: AttentionState, output: Tensor, table: TileTable | None = None) -> None:
    """Run the kernels on `state`, in place. `state.length` is read only; the caller advances it.

    Args:
        inputs: Contiguous, with `new_tokens`.
        output: Like query.
    """
    query = inputs.query
    prepared = _prepared(query.device, table, *_kind(query, state))
    tensors = {**vars(inputs), **_states(state), "output": output, "past_length": state.length}
    launcher.Launcher().run(prepared, tensors, query)


def _states(state: AttentionState) -> dict[str, Tensor | None]:
    """The states by their names in kernels; words as codes."""
    keys, values = (x.view(torch.int8) if x.dtype == torch.int32 else x for x in (state.key, state.value))
    scales = {"key_scale": state.key_scale, "value_scale": state.value_scale}
    return {"present_key": keys, "present_value": values, **scales}


def fastest_attention(inputs: Inputs, state: AttentionState, in_place: bool = False) -> tuple[Tensor, AttentionState]:
    """Softmax attention with a cache, by the fastest implementation that covers the call; results and errors: see `blocked_attention`.

    The Triton kernels run on CUDA and read nothing back to the host: a sequence that outgrows the state gets NaN outputs instead of an
    exception. PyTorch runs on CPUs and if gradients are required.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
        ShapeError: A state to be written in place is not contiguous.
    """
    if not has_kernels(inputs.query.device) or inputs.needs_gradients():
        return blocked_attention(inputs, state, in_place)
    demand_alike(inputs.query, state.key)
    batch, tokens = inputs.check()
    state.check(inputs)
    query, new_tokens = inputs.query, inputs.new_tokens
    launcher.check_device(query)
    states = {name: launcher.written(x, in_place) for name, x in state.tensors().items() if name != "length"}
    if new_tokens is None:
        new_tokens = torch.full((batch,), tokens, dtype=state.length.dtype, device=query.device)
    length = state.length.contiguous()
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    inputs_contiguous = (x.contiguous() for x in (query, inputs.key, inputs.value, new_tokens))
    launch_attention(Inputs(*inputs_contiguous), AttentionState(**states, length=length), output)
    return output, AttentionState(**states, length=length + new_tokens.to(length.dtype))


attention = op_of_keys(ATTENTION, Inputs)(fastest_attention)


def attention_(
    query: Tensor, key: Tensor, value: Tensor, new_tokens: Tensor, length: Tensor | None, state: AttentionState | None
) -> Tensor:
    """`fastest_attention` in place, always as a node. Writes new keys and values into `state` after `length` [B] tokens and returns the
    output."""
    assert length is not None and state is not None
    states = [getattr(state, s.name) for s in ATTENTION.states]
    return torch.ops.still.attention_(query, key, value, new_tokens, length, *states, state.cache)


def bind_decode(inputs: Inputs, state: AttentionState) -> Bound | None:
    """Prepared launches for decode steps like this one, which write into `state`; None if kernels would need copies of its tensors.

    Each call passes output, query, key, value, new_tokens and past_length, with these shapes and types.

    Raises:
        UnsupportedError: No kernel covers the layer.
    """
    if not (
        inputs.query.is_cuda
        and inputs.query.shape[1] == 1
        and all(x.is_contiguous() for name, x in state.tensors().items() if name != "length")
    ):
        return None
    inputs.check()
    state.check(inputs)
    demand_alike(inputs.query, state.key)
    prepared = _prepared(inputs.query.device, None, *_kind(inputs.query, state))
    names = ("output", "query", "key", "value", "new_tokens", "past_length")
    return Bound(prepared, inputs.query.dtype, _states(state), names)
