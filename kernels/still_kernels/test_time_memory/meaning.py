"""The definition of still::TestTimeMemory: chunk after chunk, all sequences at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from still_graphs.errors import ShapeError
from still_kernels.sizes import counts_of, sizes_of_call
from still_kernels.test_time_memory.spec import MATRIX_EPSILON, ORTHOGONALIZE, ROW_EPSILON, TEST_TIME_MEMORY
from still_kernels.torch_ops import traced_op


class MemoryState(NamedTuple):
    """Of sequences, in at least float32: what the weights are more than the initial ones, their momentum, the open chunk's gradient
    [B, H, 3, M, D] each, and the sum of its momentum [B, H]."""

    memory_step: Tensor
    memory_momentum: Tensor
    memory_gradient: Tensor
    momentum_sum: Tensor


@dataclass(frozen=True)
class Inputs:
    """Tensors and attributes of one call (see the op's spec), fp16, bf16, fp32 or fp64."""

    query: Tensor
    key: Tensor
    value: Tensor
    rate: Tensor
    momentum: Tensor
    initial: Tensor
    new_tokens: Tensor
    past_length: Tensor
    chunk_size: int = 64
    memory_update: str = "muon"

    def check(self, state: MemoryState) -> None:
        """Raise ShapeError where a tensor or an attribute does not fit."""
        sizes = sizes_of_call(TEST_TIME_MEMORY, self, **state._asdict())
        if self.chunk_size < 1:
            raise ShapeError(f"chunk_size={self.chunk_size}; it must be at least 1.")
        counts_of(self.past_length, self.new_tokens, sizes["T"])


@traced_op(TEST_TIME_MEMORY, Inputs, MemoryState)
def read_and_learn(inputs: Inputs, state: MemoryState) -> tuple[Tensor, MemoryState]:
    """Output [B, T, H, G, D], dtype of query, 0 at padding; and the state after the call. Any split gives the same; it can be derived."""
    inputs.check(state)
    wide = torch.promote_types(inputs.query.dtype, torch.float32)
    tokens, chunk = inputs.query.shape[1], inputs.chunk_size
    offset, new = inputs.past_length % chunk, inputs.new_tokens
    slots = torch.arange(min(tokens, chunk), device=new.device)
    initial = inputs.initial.to(wide)
    step, momentum, gradient, total = (x.to(wide) for x in state)
    output = inputs.query.new_zeros(inputs.query.shape, dtype=wide)
    for piece in range(max(0, (int(offset.max()) + tokens - 1) // chunk + 1) if tokens else 0):
        # Of each sequence what it brings of one chunk.
        start = (piece * chunk - offset).clamp_min(0)
        end = torch.minimum((piece + 1) * chunk - offset, new)
        place = start[:, None] + slots  # [B, S]
        real = place < end[:, None]
        place = place.clamp_max(tokens - 1)

        def taken(x: Tensor, place: Tensor = place, real: Tensor = real) -> Tensor:
            """[B, T, H, ...] as [B, H, S, ...], 0 where there is no token."""
            rows = x.to(wide).gather(1, place.reshape(*place.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))
            return rows.masked_fill(~real.reshape(*real.shape, *[1] * (x.dim() - 2)), 0).transpose(1, 2)

        gate, up, down = (initial + step).unbind(2)  # [B, H, M, D]
        query, key, value, rate = (taken(x) for x in (inputs.query, inputs.key, inputs.value, inputs.rate))
        rows = query.flatten(2, 3)
        read = (silu(rows @ gate.mT) * (rows @ up.mT)) @ down
        read = read.unflatten(2, query.shape[2:4]).transpose(1, 2)
        index = place.masked_fill(~real, tokens)[..., None, None, None].expand(read.shape)
        padded = torch.cat((output, output.new_zeros(len(new), 1, *output.shape[2:])), 1)
        output = padded.scatter(1, index, read)[:, :tokens]

        before, linear, back = key @ gate.mT, key @ up.mT, value @ down.mT  # [B, H, S, M]
        sigmoid = before.sigmoid()
        turned = back * linear * sigmoid * (1 + before * (1 - sigmoid))
        parts = (turned, key), (back * before * sigmoid, key), (before * sigmoid * linear, value)
        found = [(x * rate[..., i : i + 1]).mT @ y for i, (x, y) in enumerate(parts)]
        gradient = gradient + torch.stack(found, 2)
        total = total + taken(inputs.momentum).sum(-1)

        closed = (offset + end >= (piece + 1) * chunk) & (end > start)
        if bool(closed.any()):
            left = gradient + (total / chunk)[..., None, None, None] * momentum
            after = initial + step + (orthogonalized(left) if inputs.memory_update == "muon" else left)
            after = with_norms(after, initial) - initial
            every = closed[:, None, None, None, None]
            step, momentum = torch.where(every, after, step), torch.where(every, left, momentum)
            gradient = gradient.masked_fill(every, 0)
            total = total.masked_fill(closed[:, None], 0)
    return output.to(inputs.query.dtype), MemoryState(step, momentum, gradient, total)


def orthogonalized(x: Tensor) -> Tensor:
    """[.., M, D] with singular values near 1."""
    wide = x.shape[-2] < x.shape[-1]
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + MATRIX_EPSILON)
    for a, b, c in ORTHOGONALIZE:
        square = x.mT @ x
        x = a * x + x @ (b * square + c * square @ square)
    return x.mT if wide else x


def with_norms(x: Tensor, like: Tensor) -> Tensor:
    """[.., 3, M, D] whose output rows have the norms of those of `like`."""

    def norms(of: Tensor) -> Tensor:
        rows, columns = of[..., :2, :, :].norm(dim=-1, keepdim=True), of[..., 2:, :, :].norm(dim=-2, keepdim=True)
        sizes = of.shape[-2:]
        return torch.cat((rows.expand(*rows.shape[:-2], *sizes), columns.expand(*columns.shape[:-2], *sizes)), -3)

    return x / (norms(x) + ROW_EPSILON) * norms(like)
