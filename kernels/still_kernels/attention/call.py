"""Calls of still::Attention: the form for a device, and the launch of the Triton kernels."""

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
    """What the launches of a call follow from."""
    sizes = (*zip("BTHD", query.shape, strict=True), ("HK", state.key.shape[1]), ("N", state.rows))
    scales = ("key_scale", "value_scale") if state.cache == "int8" else ()
    return query.dtype, sizes, ((CACHE.name, state.cache),), scales


def launch_attention(inputs: Inputs, state: AttentionState, output: Tensor, table: TileTable | None = None) -> None:
    """Run the kernels on `state`, in place; `state.length` is read and left for the caller to advance.

    Args:
        inputs: Contiguous, with `new_tokens`.
        output: As query.
    """
    query = inputs.query
    prepared = _prepared(query.device, table, *_kind(query, state))
    tensors = {**vars(inputs), **_states(state), "output": output, "past_length": state.length}
    launcher.Launcher().run(prepared, tensors, query)


def _states(state: AttentionState) -> dict[str, Tensor | None]:
    """The states as the kernels call them; words as the codes that they hold."""
    keys, values = (x.view(torch.int8) if x.dtype == torch.int32 else x for x in (state.key, state.value))
    scales = {"key_scale": state.key_scale, "value_scale": state.value_scale}
    return {"present_key": keys, "present_value": values, **scales}


def fastest_attention(inputs: Inputs, state: AttentionState, in_place: bool = False) -> tuple[Tensor, AttentionState]:
    """Softmax attention with a cache by the fastest form that covers the call; results and errors: see `blocked_attention`.

    On CUDA the Triton kernels, without reading anything back to the host: a sequence that outgrows the state gets NaN outputs there
    instead of an exception. Where gradients are asked for, and on the CPU, the PyTorch form.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
        ShapeError: A state that is written in place is not contiguous.
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
    """The same with the new keys and values written into `state`, after `length` [B] tokens, and the output alone; always a node."""
    assert length is not None and state is not None
    states = [getattr(state, s.name) for s in ATTENTION.states]
    return torch.ops.still.attention_(query, key, value, new_tokens, length, *states, state.cache)


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
    inputs.check()
    state.check(inputs)
    demand_alike(inputs.query, state.key)
    prepared = _prepared(inputs.query.device, None, *_kind(inputs.query, state))
    names = ("output", "query", "key", "value", "new_tokens", "past_length")
    return Bound(prepared, inputs.query.dtype, _states(state), names)
