"""Calls of still::Attention: the form for a device, and the launch of the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from still_graphs.spec import CACHE
from still_kernels import launcher
from still_kernels.alike import demand_alike
from still_kernels.attention.meaning import AttentionState, Inputs, blocked_attention
from still_kernels.attention.plan import KERNELS, tile_table
from still_kernels.forms import has_kernels
from still_kernels.launcher import Bound
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


def _bound_decode(query: Tensor, state: AttentionState) -> launcher.Bound:
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


def attention(inputs: Inputs, state: AttentionState, in_place: bool = False) -> tuple[Tensor, AttentionState]:
    """Softmax attention with a cache by the fastest form that covers the call; results and errors as of `blocked_attention`.

    On CUDA the Triton kernels, without reading anything back to the host: a sequence that outgrows the state gets NaN outputs there
    instead of an exception. Where gradients are asked for, and on the CPU, the PyTorch form.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
    """
    if not has_kernels(inputs.query.device) or inputs.wants_gradients():
        return blocked_attention(inputs, state, in_place)
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
    inputs.check()
    state.check(inputs)
    demand_alike(inputs.query, state.key)
    return _bound_decode(inputs.query, state)
