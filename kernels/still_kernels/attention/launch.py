"""Runs the plan of still::Attention with Triton: which tensors go by which name, and sizes of a call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from still_graphs.errors import ShapeError, UnsupportedError
from still_graphs.ops.spec import CACHE
from still_kernels import launcher
from still_kernels.attention.functions import FUNCTIONS
from still_kernels.attention.inputs import Inputs
from still_kernels.attention.plan import PLAN
from still_kernels.attention.state import AttentionState
from still_kernels.attention.tiles import tile_table
from still_kernels.attention.variants import KERNELS, constants_of, plan_constants
from still_kernels.packing import Packing, size_of_call
from still_kernels.plan import Call
from still_kernels.tile import TileTable


def device_table(head_dim: int, device: torch.device, wide: bool) -> TileTable:
    """Block sizes for a device; the interpreter on the CPU uses those of sm_90."""
    return tile_table(launcher.arch_of(device), head_dim, wide)


def _prepare(
    dtype: torch.dtype,
    table: TileTable,
    variant: object | None,
    heads: tuple[int, int, int],
    batch: int,
    tokens: int,
    rows: int,
    cache: str,
    packed: tuple[int, int] | None,
) -> launcher.Prepared:
    """The launches of a kind of call.

    Args:
        heads: H, HK, D.
        rows: N.
        cache: The op's attribute.
        packed: Tokens of all rows and rows of the state, where rows are packed.
    """
    sizes = dict(zip(("H", "HK", "D"), heads, strict=True)) | {"B": batch, "T": tokens, "N": rows}
    seen = Call(
        sizes,
        {CACHE.name: cache},
        plan_constants(table),
        dtype=str(dtype).removeprefix("torch."),
        present=frozenset({"key_scale", "value_scale"} if cache == "int8" else ()),
        tokens=None if packed is None else packed[0],
        rows=None if packed is None else packed[1],
    )
    reasons = KERNELS.refusals(seen)
    if reasons:
        raise UnsupportedError(f"no Triton kernel of still::Attention covers this layer: {' '.join(reasons)}")
    constants = constants_of(heads[2], dtype == torch.float32, packed is not None, cache)
    return launcher.prepare(PLAN.evaluate(seen), FUNCTIONS, table.kernels(), constants, variant)


@lru_cache(1024)
def _prepared(device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], *call: Any) -> launcher.Prepared:
    """The same with the block sizes of the device; kept, for a layer is called once per token."""
    variant = launcher.variant_of(device, dtype, heads[2], call[-2], call[-1] is not None)
    return _prepare(dtype, device_table(heads[2], device, dtype == torch.float32), variant, heads, *call)


def launch_attention(
    inputs: Inputs,
    state: AttentionState,
    output: Tensor,
    packing: Packing | None = None,
    table: TileTable | None = None,
) -> None:
    """Run the kernels on `state`, in place; `state.length` is read and left for the caller to advance.

    Args:
        inputs: Contiguous; without a packing `new_tokens` are given.
        output: As query.
        table: Block sizes; by default those of the device. With others Triton looks for the compiled kernels at each launch.

    Raises:
        UnsupportedError: No kernel covers the call; the message lists what is covered.
    """
    query, heads = inputs.query, (inputs.query.shape[-2], inputs.key.shape[-2], inputs.query.shape[-1])
    batch, tokens, packed = size_of_call(query, packing, state.length.shape[0])
    call = (heads, batch, tokens, state.rows, state.cache, packed)
    if table is None:
        prepared = _prepared(query.device, query.dtype, *call)
    else:
        prepared = _prepare(query.dtype, table, None, *call)
    tensors = {
        **vars(inputs),
        **_states(state),
        "output": output,
        "past_length": state.length,
        **({} if packing is None else packing.tensors()),
    }
    launcher.Launcher().run(prepared, tensors, query)


def bind_decode(query: Tensor, state: AttentionState) -> launcher.Bound:
    """Decode steps with such a query [B, 1, H, D] on `state`, in place: output, query, key, value, new_tokens and past_length are those
    of each call."""
    batch, rows = query.shape[0], state.rows
    prepared = _prepared(
        query.device,
        query.dtype,
        (query.shape[2], state.key.shape[1], query.shape[3]),
        batch,
        1,
        rows,
        state.cache,
        None,
    )
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
    if query.device.type != "cuda":
        raise UnsupportedError(f"device {query.device.type!r} has no kernel; known: cpu (PyTorch), cuda (Triton).")
    states = {name: x for name, x in state.tensors().items() if name != "length"}
    if in_place and not all(x.is_contiguous() for x in states.values()):
        raise ShapeError("the state's keys or values are not contiguous, and the kernels write them in place.")
    if new_tokens is None:
        new_tokens = torch.full((batch,), tokens, dtype=state.length.dtype, device=query.device)
    length = state.length.contiguous()
    if not in_place:
        states = {name: x.clone(memory_format=torch.contiguous_format) for name, x in states.items()}
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    given = (x.contiguous() for x in (query, inputs.key, inputs.value, new_tokens))
    launch_attention(Inputs(*given), AttentionState(**states, length=length), output)
    return output, AttentionState(**states, length=length + new_tokens.to(length.dtype))
