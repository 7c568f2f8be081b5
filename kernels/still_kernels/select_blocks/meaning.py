"""Definition of still::SelectBlocks: every mean of keys, every block's score, sorted; in blocks of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.select_blocks.spec import SELECT_BLOCKS, Choice, fault_of
from still_kernels.sizes import sizes_of_call

TOKENS = 256
"""Queries whose scores are in memory at once."""
NEVER, LARGEST = -1e30, 80.0
"""A masked logit, and the largest exponent."""
LEAST, MOST = 1e-37, 1e37
"""Range of scores, below that of blocks that are always chosen; logarithms start at the lower bound."""


@dataclass(frozen=True)
class Inputs(Choice):
    """Tensors and attributes of one call (see the op's spec), fp16, bf16, fp32 or fp64."""

    query: Tensor
    key: Tensor
    new_tokens: Tensor
    past_length: Tensor

    def check(self, state: Tensor) -> None:
        """Raise ShapeError for a tensor or attribute that does not fit."""
        sizes = sizes_of_call(SELECT_BLOCKS, self, key_sum=state)
        if sizes["H"] % sizes["HK"]:
            raise ShapeError(f"query has {sizes['H']} heads, which is no multiple of the {sizes['HK']} of key.")
        if fault := fault_of({a.name: getattr(self, a.name) for a in SELECT_BLOCKS.attributes}):
            raise ShapeError(f"SelectBlocks: {fault}.")
        ends = (self.past_length + self.new_tokens).tolist()
        counts = self.new_tokens.tolist()
        if any(not 0 <= n <= sizes["T"] or end < n for n, end in zip(counts, ends, strict=True)):
            raise ShapeError(f"new_tokens {counts} after {self.past_length.tolist()} tokens; expected 0..{sizes['T']}.")
        if max(ends, default=0) > state.shape[2] * self.mean_stride:
            raise ShapeError(
                f"a sequence grows to {max(ends)} tokens; key_sum has {state.shape[2]} rows of {self.mean_stride}."
            )


Watch = Callable[[Tensor], Tensor | None]
"""Receives each block's distance from the boundary of the choice, [B, T, 1, blocks * HK], the heads of a block together. The distance is
the logarithm of its score minus the midpoint between the weakest chosen and the best rejected one; infinite if scores do not decide.
Returns blocks to read instead, [B, T, n], with the same numbering; -1: none."""


def naive_select_blocks(inputs: Inputs, state: Tensor, watch: Watch | None = None) -> tuple[Tensor, Tensor]:
    """Blocks int32 [B, T, HK, slots], ascending, -1 after them and at padding; and the sums of keys after the call.

    Args:
        watch: Receives the choices and may replace them.
        state: Sums of the earlier keys, [B, HK, N, D], float32, float64 for float64 activations; a row for each `stride` tokens.
    """
    inputs.check(state)
    batch, tokens, _, _ = inputs.query.shape
    heads = inputs.key.shape[2]
    present = state.clone()
    blocks = torch.full((batch, tokens, heads, inputs.block_slots), -1, dtype=torch.int32, device=state.device)
    most = -(-int((inputs.past_length + inputs.new_tokens).max()) // inputs.block_size) if batch and watch else 0
    margins = state.new_full((batch, tokens, most, heads), -torch.inf)
    for row, (past, new) in enumerate(zip(inputs.past_length.tolist(), inputs.new_tokens.tolist(), strict=True)):
        if not new:
            continue
        places = torch.arange(past, past + new, device=state.device)
        own = present[row]
        own[:, -(-past // inputs.mean_stride) : -(-(past + new) // inputs.mean_stride)] = (
            0  # unfilled rows are not read
        )
        own.index_add_(1, places // inputs.mean_stride, inputs.key[row, :new].transpose(0, 1).to(state.dtype))
        sums = own[:, : -(-(past + new) // inputs.mean_stride)]
        query = inputs.query[row, :new].to(state.dtype).unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [HK, G, T, D]
        for start in range(0, new, TOKENS):
            part = slice(start, min(start + TOKENS, new))
            reach = places[part] + 1 if not inputs.switch_by_call else torch.full_like(places[part], past + new)
            chosen, scores = _choose(inputs, query[:, :, part], sums, places[part], reach < inputs.dense_length)
            blocks[row, part, :, : chosen.shape[-1]] = chosen.transpose(0, 1)
            if watch:
                margins[row, part, : scores.shape[-1]] = _margins(scores, chosen).permute(1, 2, 0)
    choices = watch(margins.flatten(2)[:, :, None]) if watch else None
    return blocks if choices is None else _replaced(blocks, choices, most), present


def _margins(scores: Tensor, chosen: Tensor) -> Tensor:
    """Margins for `Watch`, [HK, T, blocks], from scores and the choice [HK, T, slots or fewer]."""
    count = scores.shape[-1]
    places = torch.where(chosen < 0, count, chosen).long()
    taken = torch.zeros(*scores.shape[:-1], count + 1, dtype=torch.bool, device=scores.device)
    taken = taken.scatter_(-1, places, True)[..., :count]
    rank = scores.clamp_min(LEAST).log().masked_fill(scores < 0, -torch.inf)
    least = rank.where(taken, torch.inf).amin(-1, keepdim=True)
    best = rank.where(~taken, -torch.inf).amax(-1, keepdim=True)
    decided = least.isfinite() & best.isfinite()
    lead = rank - (least + best) / 2
    lead = torch.where(
        taken, lead.clamp_min(LEAST), lead.clamp_max(-LEAST)
    )  # blocks that share a mean have equal scores
    return torch.where(decided, lead, torch.where(taken, torch.inf, -torch.inf))


def _replaced(blocks: Tensor, choices: Tensor, most: int) -> Tensor:
    """`blocks` [B, T, HK, slots] with at most `most` replaced blocks for tokens in `choices`."""
    heads, slots = blocks.shape[2:]
    end = most * heads
    places = torch.where((choices < 0) | (choices >= end), end, choices)
    read = torch.zeros(*choices.shape[:2], end + 1, dtype=torch.bool, device=choices.device).scatter_(-1, places, True)
    read = read[..., :end].unflatten(-1, (most, heads)).transpose(2, 3)
    found = torch.where(read, torch.arange(most, device=choices.device), most).sort(-1).values[..., :slots]
    found = torch.nn.functional.pad(found.where(found < most, -1), (0, slots - found.shape[-1]), value=-1)
    return torch.where((choices >= 0).any(-1)[..., None, None], found.to(blocks.dtype), blocks)


def means(sums: Tensor, stride: int, kernel: int, row: int) -> Tensor:
    """Means of `kernel` keys at every `stride`-th one, [HK, J, D], from sums of `row` keys [HK, N, D]; the last ones are incomplete."""
    width, step = kernel // row, stride // row
    padded = torch.nn.functional.pad(sums, (0, 0, 0, width - 1 + step))
    return padded.unfold(1, width, step).sum(-1)[:, : -(-sums.shape[1] // step)] / kernel


def _choose(inputs: Inputs, query: Tensor, sums: Tensor, places: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks int32 [HK, T, slots or fewer] of tokens at `places` [T], query [HK, G, T, D], and the compared scores [HK, T, blocks].

    Tokens with `dense` [T] read all blocks. Scores are infinite for blocks always chosen, negative for those never chosen.
    """

    def logits(stride: int, kernel: int) -> Tensor:
        keys = means(sums, stride, kernel, inputs.mean_stride)
        ends = torch.arange(keys.shape[1], device=places.device) * stride + kernel - 1
        found = query @ keys[:, None].transpose(2, 3) * query.shape[-1] ** -0.5
        return found.masked_fill(ends > places[:, None], NEVER)

    total = logits(inputs.lse_stride, inputs.lse_length).logsumexp(-1, keepdim=True)  # [HK, G, T, 1]
    fine = logits(inputs.mean_stride, inputs.mean_length)
    # Before the first coarse mean is complete, every block is read.
    shares = torch.where(fine > NEVER, (fine - total).clamp_max(LARGEST).exp(), 0.0).sum(1).clamp_max(MOST)
    shared, per = inputs.mean_length // inputs.mean_stride, inputs.block_size // inputs.mean_stride
    count = int(places[-1]) // inputs.block_size + 1
    room = count * per + shared - 1
    padded = torch.nn.functional.pad(shares, (shared - 1, max(0, room - shares.shape[-1] - shared + 1)))
    scores = padded[..., :room].unfold(2, per + shared - 1, per).amax(-1)  # [HK, T, blocks]
    number, own = torch.arange(count, device=places.device), (places // inputs.block_size)[:, None]
    dense = dense[:, None]
    always = (number < inputs.init_blocks) | (number >= own - inputs.local_blocks) | dense
    scores = scores.masked_fill(always, torch.inf).masked_fill(number > own, -1.0)
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., : inputs.block_slots]
    taken = (scores.gather(-1, order) >= 0) & (
        dense | (torch.arange(order.shape[-1], device=order.device) < inputs.top_blocks)
    )
    order = torch.where(taken, order, count).sort(-1).values
    return torch.where(order < count, order, -1).to(torch.int32), scores
