"""The PyTorch form: appends to the cache, then attends to what is filled. Query heads of a group are rows of one GEMM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from still_graphs.errors import CapacityError, ShapeError
from still_kernels.attention.inputs import Inputs
from still_kernels.attention.state import AttentionState
from still_kernels.codes import dequantized, quantized

BLOCK = 256
"""Query tokens of one GEMM: a mask beside 8,192 keys is then 24 MB for three heads a group, whatever the prompt's length."""


Seen = Callable[[slice, slice, int], Tensor]
"""Of sequences, tokens and an end: whether they see each of the first positions up to it, [B, HK, T, end], causality apart."""
Attend = Callable[[slice, Tensor, Tensor, Tensor, int], Tensor]
"""Of sequences, as `_attend`."""


def blocked_attention(
    inputs: Inputs,
    state: AttentionState,
    in_place: bool = False,
    seen: Seen | None = None,
    attend: Attend | None = None,
) -> tuple[Tensor, AttentionState]:
    """Causal softmax attention of new tokens to themselves and to the cache; any split of a sequence gives the same.

    Args:
        state: What the sequences have seen; only filled rows of it are read.
        in_place: Write into `state`'s keys and values, and return them.
        seen: None: every position up to a token's own.
        attend: In the place of softmax attention.

    Returns:
        output [B, T, H, D], dtype of query, 0 at padding, which enters nothing; and the state after the call.

    Raises:
        ShapeError: A tensor does not fit.
        CapacityError: A sequence outgrows the state.
    """
    batch, tokens = inputs.check()
    state.check(inputs)
    query = inputs.query
    past: list[int] = state.length.tolist()
    new: list[int] = [tokens] * batch if inputs.new_tokens is None else inputs.new_tokens.tolist()
    for row, (length, count) in enumerate(zip(past, new, strict=True)):
        if length < 0 or not 0 <= count <= tokens:
            raise ShapeError(
                f"sequence {row} has length {length} and {count} new tokens; expected at least 0, at most {tokens} new."
            )
        if length + count > state.rows:
            raise CapacityError(
                f"sequence {row} grows to {length + count} tokens; the state has room for {state.rows}. Give a larger state."
            )
    present = {name: x if in_place else x.clone() for name, x in state.tensors().items() if name != "length"}
    alike = len(set(past)) == 1 and len(set(new)) == 1
    outputs = []
    for rows in [slice(None)] if alike else [slice(row, row + 1) for row in range(batch)]:
        length, count = past[rows][0], new[rows][0]
        place = (rows, slice(None), slice(length, length + count))
        for name, tensor in (("key", inputs.key), ("value", inputs.value)):
            fresh, scale = tensor[rows, :count].transpose(1, 2), f"{name}_scale"
            if scale in present:
                fresh, present[scale][place] = quantized(fresh)
            present[name][place] = fresh
        keys, values = (_rows(present, name, rows, length + count, query.dtype) for name in ("key", "value"))
        own = query[rows, :count]
        output = (
            attend(rows, own, keys, values, length)
            if attend
            else _attend(own, keys, values, length, seen and partial(seen, rows))
        )
        outputs.append(torch.nn.functional.pad(output, (0, 0, 0, 0, 0, tokens - count)))
    after = torch.tensor([sum(x) for x in zip(past, new, strict=True)], dtype=state.length.dtype, device=query.device)
    output = torch.cat(outputs) if outputs else torch.zeros_like(query)
    return output, AttentionState(**present, length=after)


def _rows(state: dict[str, Tensor], name: str, rows: slice, end: int, dtype: torch.dtype) -> Tensor:
    """Keys or values [B, HK, end, D] of these sequences of the batch, in the type of the activations."""
    held, scale = state[name][rows, :, :end], state.get(f"{name}_scale")
    return held.to(dtype) if scale is None else dequantized(held, scale[rows, :, :end], dtype)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, length: int, seen: Callable[[slice, int], Tensor] | None = None
) -> Tensor:
    """Output [B, T, H, D] of query [B, T, H, D] at positions from `length` on; keys and values [B, HK, .., D] have them already."""
    batch, tokens, heads, dim = query.shape
    group = heads // keys.shape[1]
    outputs = []
    for start in range(0, tokens, BLOCK):
        block = query[:, start : start + BLOCK]
        count, end = block.shape[1], length + start + block.shape[1]
        rows = block.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, HK, G * count, D]
        mask = None
        if count > 1:
            last = torch.arange(end - count, end, device=query.device).repeat(group)
            mask = torch.arange(end, device=query.device) <= last[:, None]
        if seen is not None:
            own = seen(slice(start, start + count), end).repeat(1, 1, group, 1)
            mask = own if mask is None else own & mask
        mixed = scaled_dot_product_attention(rows, keys[:, :, :end], values[:, :, :end], attn_mask=mask)
        outputs.append(mixed.reshape(batch, heads, count, dim).transpose(1, 2))
    return torch.cat(outputs, dim=1) if outputs else torch.zeros_like(query)
