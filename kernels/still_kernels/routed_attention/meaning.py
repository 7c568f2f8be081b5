"""The definition of still::RoutedAttention: linear attention from one end of a chunk to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.linear_attention.chunked import chunked_linear_attention
from still_kernels.linear_attention.meaning import Inputs as LinearInputs
from still_kernels.routed_attention.spec import ROUTED_ATTENTION, ROUTED_CHUNK
from still_kernels.sizes import counts_of, sizes_of_call
from still_kernels.torch_ops import traced_op


class RoutedState(NamedTuple):
    """Of sequences: the rule's state and the one before the open chunk, [B, H, D, V], in at least float32."""

    routed_state: Tensor
    chunk_state: Tensor


@dataclass(frozen=True)
class Inputs:
    """Tensors and attributes of one call (see the op's spec), fp16, bf16, fp32 or fp64. Keys are of unit length.

    decay: Logarithm of what stays of the state at each token, at most 0, [B, T, H].
    beta: Step size, [B, T, H].
    softmax: Whether the chunk goes to softmax, read at chunks' last tokens, int [B, T, R].
    keep_decay: A chunk that is taken back leaves its decay.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    softmax: Tensor
    new_tokens: Tensor
    past_length: Tensor
    keep_decay: int = 1

    def check(self, state: RoutedState) -> tuple[int, list[tuple[int, int]]]:
        """Heads of a route; past and new tokens of each sequence."""
        sizes = sizes_of_call(ROUTED_ATTENTION, self, **state._asdict())
        if sizes["H"] % sizes["R"]:
            raise ShapeError(f"softmax has {sizes['R']} routes, which do not divide the {sizes['H']} heads.")
        return sizes["H"] // sizes["R"], counts_of(self.past_length, self.new_tokens, sizes["T"])


@traced_op(ROUTED_ATTENTION, Inputs, RoutedState)
def routed_attention(inputs: Inputs, state: RoutedState) -> tuple[Tensor, RoutedState]:
    """The rule of `chunked_linear_attention`, whose chunks are taken back where they go to softmax; any split gives the same.

    Returns:
        output [B, T, H, V], dtype of query, 0 at padding; and the state after the call.
    """
    group, counts = inputs.check(state)
    runs, starts, outputs = [], [], []
    for row, (at, count) in enumerate(counts):
        run, start, done = state.routed_state[row : row + 1], state.chunk_state[row : row + 1], 0
        parts = []
        while done < count:
            size = min(ROUTED_CHUNK - at % ROUTED_CHUNK, count - done)
            part = (slice(row, row + 1), slice(done, done + size))
            decay = inputs.decay[part].to(run.dtype)
            rule = LinearInputs(
                inputs.query[part][:, :, :, None],
                inputs.key[part],
                inputs.value[part],
                decay[..., None],
                inputs.beta[part],
            )
            output, run = chunked_linear_attention(rule, run)
            parts.append(output[0, :, :, 0])
            if inputs.keep_decay:
                start = start * decay.sum(1).exp()[..., None, None]
            at, done = at + size, done + size
            if at % ROUTED_CHUNK == 0:
                taken = inputs.softmax[row, done - 1] > 0  # [R]
                run = start = torch.where(taken.repeat_interleave(group)[:, None, None], start, run)
        padding = inputs.value.new_zeros(inputs.value.shape[1] - count, *inputs.value.shape[2:])
        outputs.append(torch.cat((*parts, padding)))
        runs.append(run)
        starts.append(start)
    return torch.stack(outputs).to(inputs.query.dtype), RoutedState(torch.cat(runs), torch.cat(starts))
