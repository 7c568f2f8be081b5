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
from still_kernels.sizes import sizes_of, tensors_of


class RoutedState(NamedTuple):
    """Of sequences: the rule's state and the one before the open chunk, [B, H, D, V], in at least float32."""

    routed_state: Tensor
    chunk_state: Tensor


@dataclass(frozen=True)
class Inputs:
    """Tokens and counts of one call; fp16, bf16, fp32 or fp64.

    query, key: [B, T, H, D]; keys of unit length.
    value: [B, T, H, V].
    decay: Logarithm of what stays of the state at each token, at most 0, [B, T, H].
    beta: Step size, [B, T, H].
    softmax: Whether the chunk goes to softmax, read at chunks' last tokens, int [B, T, R].
    new_tokens: Tokens that each sequence brings, the rest of its T is padding, int [B].
    past_length: Tokens that each has seen, int [B].
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

    def check(self, state: RoutedState) -> tuple[int, int]:
        """Heads of a route, and T.

        Raises:
            ShapeError: A tensor does not fit.
        """
        past = {f"past_{name}": x.shape for name, x in state._asdict().items()}
        sizes = sizes_of(ROUTED_ATTENTION, {n: x.shape for n, x in tensors_of(self).items()} | past)
        if sizes["H"] % sizes["R"]:
            raise ShapeError(f"softmax has {sizes['R']} routes, which do not divide the {sizes['H']} heads.")
        for name in ("routed_state", "chunk_state"):
            expected = [sizes[n] for n in "BHDV"]
            if list(past[f"past_{name}"]) != expected:
                raise ShapeError(f"{name}: expected {expected}, got {list(past[f'past_{name}'])}.")
        new, lengths = self.new_tokens.tolist(), self.past_length.tolist()
        for row, (count, length) in enumerate(zip(new, lengths, strict=True)):
            if length < 0 or not 0 <= count <= sizes["T"]:
                raise ShapeError(f"sequence {row} has length {length} and {count} new tokens of {sizes['T']}.")
        return sizes["H"] // sizes["R"], sizes["T"]


def routed_attention(inputs: Inputs, state: RoutedState) -> tuple[Tensor, RoutedState]:
    """The rule of `naive_linear_attention`, whose chunks are taken back where they go to softmax; any split gives the same.

    Returns:
        output [B, T, H, V], dtype of query, 0 at padding; and the state after the call.

    Raises:
        ShapeError: A tensor does not fit.
    """
    group, tokens = inputs.check(state)
    runs, starts, outputs = [], [], []
    for row, (at, count) in enumerate(zip(inputs.past_length.tolist(), inputs.new_tokens.tolist(), strict=True)):
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
        padding = inputs.value.new_zeros(tokens - count, *inputs.value.shape[2:])
        outputs.append(torch.cat((*parts, padding)))
        runs.append(run)
        starts.append(start)
    return torch.stack(outputs).to(inputs.query.dtype), RoutedState(torch.cat(runs), torch.cat(starts))
