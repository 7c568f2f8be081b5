"""Definition of still::KeptAttention: one route after the other, one chunk at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from still_graphs.errors import CapacityError, ShapeError
from still_kernels.attention.meaning import Inputs as AttentionInputs
from still_kernels.kept_attention.spec import KEPT_ATTENTION
from still_kernels.sizes import counts_of, sizes_of_call
from still_kernels.torch_ops import traced_op


class KeptState(NamedTuple):
    """Keys and values [B, HK, N, D] of sequences, and the number of chunks that each route retains [B, R], in at least float32."""

    key: Tensor
    value: Tensor
    kept_chunks: Tensor


@dataclass(frozen=True)
class Inputs(AttentionInputs):
    """Inputs of attention, and the others of the op's spec."""

    keep: Tensor | None = None
    past_length: Tensor | None = None
    chunk_size: int = 64

    def checked(self, state: KeptState) -> tuple[int, list[tuple[int, int]]]:
        """Key/value heads of a route; past and new tokens of each sequence."""
        sizes = sizes_of_call(KEPT_ATTENTION, self, **state._asdict())
        _, tokens = self.check()
        if sizes["HK"] % sizes["R"]:
            raise ShapeError(f"keep has {sizes['R']} routes, which do not divide the {sizes['HK']} heads of key.")
        if self.chunk_size < 1:
            raise ShapeError(f"chunk_size={self.chunk_size} must be at least 1.")
        assert self.new_tokens is not None and self.past_length is not None
        counts = counts_of(self.past_length, self.new_tokens, tokens)
        for row, (length, count) in enumerate(counts):
            used = self.chunk_size * int(state.kept_chunks[row].max()) + length % self.chunk_size
            if used + count > state.key.shape[2]:
                raise CapacityError(
                    f"sequence {row} keeps {used} tokens and brings {count}; the state has room for {state.key.shape[2]}. "
                    "Give a larger state."
                )
        return sizes["HK"] // sizes["R"], counts


@traced_op(KEPT_ATTENTION, Inputs, KeptState, writes=True)
def kept_attention(inputs: Inputs, state: KeptState, in_place: bool = False) -> tuple[Tensor, KeptState]:
    """Causal softmax attention of new tokens to retained chunks and to their own chunk. Any split of a sequence gives the same result.

    Args:
        in_place: Write into `state`'s keys and values, and return them.

    Returns:
        output [B, T, H, D], dtype of query, 0 at padding; and the state after the call.
    """
    (group, counts), size = inputs.checked(state), inputs.chunk_size
    assert inputs.keep is not None
    query, keep = inputs.query, inputs.keep > 0
    write = Tensor.scatter if inputs.needs_gradients() else Tensor.scatter_
    key, value = (x if in_place else x.clone() for x in (state.key, state.value))
    retained, outputs, rows = state.kept_chunks.clone(), [], []
    for row, (at, count) in enumerate(counts):
        done, parts, cached = 0, [], [key[row], value[row]]
        while done < count:
            part = slice(done, done + min(size - at % size, count - done))
            own = (
                retained[row].long().repeat_interleave(group)[:, None, None] * size
            )  # [HK, 1, 1], rows of retained chunks
            last = own + torch.arange(at % size, at % size + part.stop - done, device=query.device)[:, None]
            place = last.expand(-1, -1, key.shape[3])
            fresh = [x[row, part].transpose(0, 1).to(key.dtype) for x in (inputs.key, inputs.value)]
            cached = [write(x, 1, place, y) for x, y in zip(cached, fresh, strict=True)]
            parts.append(_attend(query[row, part], cached[0], cached[1], last))
            at, done = at + part.stop - done, part.stop
            if at % size == 0:
                stays = keep[row, done - 1]  # [R]
                retained[row] += stays.to(retained.dtype)
                of_heads = stays.repeat_interleave(group)[:, None, None]
                chunk = (own + torch.arange(size, device=query.device)[:, None]).expand(-1, -1, key.shape[3])
                cached = [write(x, 1, chunk, torch.where(of_heads, x.gather(1, chunk), 0)) for x in cached]
        outputs.append(torch.cat((*parts, query.new_zeros(query.shape[1] - count, *query.shape[2:]))))
        rows.append(cached)
    if inputs.needs_gradients():
        key, value = (torch.stack(x) for x in zip(*rows, strict=True))
    return torch.stack(outputs), KeptState(key, value, retained)


def _attend(query: Tensor, key: Tensor, value: Tensor, last: Tensor) -> Tensor:
    """Output for query [T, H, D]; token t reads rows up to `last` [HK, T, 1] of keys and values [HK, N, D]."""
    end, group = int(last.max()) + 1, query.shape[1] // len(key)
    mask = (torch.arange(end, device=query.device) <= last).repeat_interleave(group, 0)
    key, value = (x[:, :end].to(query.dtype).repeat_interleave(group, 0) for x in (key, value))
    return scaled_dot_product_attention(query.transpose(0, 1), key, value, attn_mask=mask).transpose(0, 1)
