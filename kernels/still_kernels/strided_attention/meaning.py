"""Definition of still::StridedAttention, for one sequence and a block of its tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.attention.meaning import BLOCK, AttentionState, op_of_keys
from still_kernels.attention.meaning import Inputs as AttentionInputs
from still_kernels.sizes import counts_of
from still_kernels.strided_attention.spec import STRIDED_ATTENTION


@dataclass(frozen=True)
class Inputs(AttentionInputs):
    """Inputs of attention, and:

    row_tokens: Tokens of a chunk, which has one row of the state.
    """

    row_tokens: int = 16

    def check(self) -> tuple[int, int]:
        if self.row_tokens < 1:
            raise ShapeError(f"row_tokens={self.row_tokens} must be at least 1.")
        return super().check()


@op_of_keys(STRIDED_ATTENTION, Inputs)
def strided_attention(inputs: Inputs, state: AttentionState, in_place: bool = False) -> tuple[Tensor, AttentionState]:
    """Output [B, T, H, D], dtype of query, 0 at padding; and the state after the call. Any split of a sequence gives the same result.

    Args:
        state: State before the call, a row for each chunk.
        in_place: Write into `state`'s keys and values, and return them.
    """
    _, tokens = inputs.check()
    state.check(inputs)
    query, size = inputs.query, inputs.row_tokens
    wide = torch.promote_types(query.dtype, torch.float32)
    counts = torch.full_like(state.length, tokens) if inputs.new_tokens is None else inputs.new_tokens
    present = {name: x if in_place else x.clone() for name, x in (("key", state.key), ("value", state.value))}
    outputs = torch.zeros_like(query)
    for row, (past, new) in enumerate(counts_of(state.length, counts, tokens, state.rows, size)):
        if not new:
            continue
        end = past + new
        rows = torch.arange(past // size, -(-end // size), device=query.device)
        last = ((rows + 1) * size).clamp_max(end) - 1 - past
        parts = {}
        for name, fresh in (("key", inputs.key), ("value", inputs.value)):
            present[name][row, :, rows] = fresh[row, last].transpose(0, 1).to(present[name].dtype)
            parts[name] = present[name][row, :, : -(-end // size)].to(wide, copy=True)
        for start in range(0, new, BLOCK):
            part = slice(start, min(start + BLOCK, new))
            outputs[row, part] = _attend(inputs, row, part, past, parts["key"], parts["value"])
    return outputs, replace(state, **present, length=state.length + counts)


def _attend(inputs: Inputs, row: int, part: slice, past: int, keys: Tensor, values: Tensor) -> Tensor:
    """Output [T, H, D] for a block of a sequence's tokens; keys and values [HK, rows, D] in at least float32."""
    wide, kv_heads = keys.dtype, keys.shape[0]
    query = inputs.query[row, part].to(wide).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [HK, G, T, D]
    own_key, own_value = (x[row, part].to(wide).transpose(0, 1)[:, None] for x in (inputs.key, inputs.value))
    chunk = torch.arange(past + part.start, past + part.stop, device=keys.device) // inputs.row_tokens
    later = torch.arange(keys.shape[1], device=keys.device) >= chunk[:, None]
    logits = (query @ keys[:, None].transpose(2, 3)).masked_fill(later, -torch.inf)
    logits = torch.cat((logits, (query * own_key).sum(-1, keepdim=True)), -1) * query.shape[-1] ** -0.5
    weights = logits.softmax(-1)
    mixed = weights[..., :-1] @ values[:, None] + weights[..., -1:] * own_value
    return mixed.permute(2, 0, 1, 3).flatten(1, 2).to(inputs.query.dtype)
