"""The definition of still::SelectBlocks: every mean of keys, every block's score, sorted; some tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.select_blocks.spec import SELECT_BLOCKS, Choice, fault_of
from still_kernels.sizes import sizes_of_call

TOKENS = 256
"""Queries whose scores are held at once."""
NEVER, LARGEST = -1e30, 80.0
"""A logit that does not count, and the largest exponent."""
LEAST, MOST = 1e-37, 1e37
"""Scores end here, below that of blocks which are chosen always; their logarithms begin there."""


@dataclass(frozen=True)
class Inputs(Choice):
    """Tensors and attributes of one call (see the op's spec), fp16, bf16, fp32 or fp64."""

    query: Tensor
    key: Tensor
    new_tokens: Tensor
    past_length: Tensor

    def check(self, state: Tensor) -> None:
        """Raise ShapeError naming the tensor or attribute that does not fit."""
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
"""Told how far each block of each head is from being chosen or not, [B, T, 1, blocks * HK], head after head of each block: the logarithm of
its score less what is between the least that is chosen and the best that is not; infinite where scores decide nothing. Gives blocks to
read in the place of these, [B, T, n], numbered so; -1: none."""


def naive_select_blocks(inputs: Inputs, state: Tensor, watch: Watch | None = None) -> tuple[Tensor, Tensor]:
    """Blocks int32 [B, T, HK, slots], ascending, -1 behind them and at padding; and the sums of keys after the call.

    Args:
        watch: Told of the choices, which it may replace.
        state: Sums of the keys so far, [B, HK, N, D], float32, float64 for float64 activations; a row for each `stride` tokens.
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
            0  # what is not filled is not read
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
    told = watch(margins.flatten(2)[:, :, None]) if watch else None
    return blocks if told is None else _replaced(blocks, told, most), present


def _margins(scores: Tensor, chosen: Tensor) -> Tensor:
    """Like `Watch`, [HK, T, blocks], of scores and what is chosen by them [HK, T, slots or fewer]."""
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


def _replaced(blocks: Tensor, told: Tensor, most: int) -> Tensor:
    """`blocks` [B, T, HK, slots] with those of tokens that are told others, of at most `most` blocks."""
    heads, slots = blocks.shape[2:]
    end = most * heads
    places = torch.where((told < 0) | (told >= end), end, told)
    read = torch.zeros(*told.shape[:2], end + 1, dtype=torch.bool, device=told.device).scatter_(-1, places, True)
    read = read[..., :end].unflatten(-1, (most, heads)).transpose(2, 3)
    found = torch.where(read, torch.arange(most, device=told.device), most).sort(-1).values[..., :slots]
    found = torch.nn.functional.pad(found.where(found < most, -1), (0, slots - found.shape[-1]), value=-1)
    return torch.where((told >= 0).any(-1)[..., None, None], found.to(blocks.dtype), blocks)


def means(sums: Tensor, stride: int, kernel: int, row: int) -> Tensor:
    """Means of `kernel` keys at every `stride`-th one, [HK, J, D], of sums of `row` keys [HK, N, D]; the last ones lack keys."""
    width, step = kernel // row, stride // row
    padded = torch.nn.functional.pad(sums, (0, 0, 0, width - 1 + step))
    return padded.unfold(1, width, step).sum(-1)[:, : -(-sums.shape[1] // step)] / kernel


def _choose(inputs: Inputs, query: Tensor, sums: Tensor, places: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks int32 [HK, T, slots or fewer] of tokens at `places` [T], query [HK, G, T, D], which read all of them where `dense` [T]; and
    what they were chosen by [HK, T, blocks], infinite where always, below 0 where never."""

    def logits(stride: int, kernel: int) -> Tensor:
        keys = means(sums, stride, kernel, inputs.mean_stride)
        ends = torch.arange(keys.shape[1], device=places.device) * stride + kernel - 1
        found = query @ keys[:, None].transpose(2, 3) * query.shape[-1] ** -0.5
        return found.masked_fill(ends > places[:, None], NEVER)

    total = logits(inputs.lse_stride, inputs.lse_length).logsumexp(-1, keepdim=True)  # [HK, G, T, 1]
    fine = logits(inputs.mean_stride, inputs.mean_length)
    # Before the first coarse mean every block is read, whatever the scores.
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
