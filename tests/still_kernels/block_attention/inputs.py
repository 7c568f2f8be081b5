"""Calls of still::SelectBlocks and still::BlockAttention: small layers, splits, and what their definitions in float64 make of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from still_kernels.select_blocks.spec import slots_of

Split = int | list[int]
SPLITS: list[Split] = [70, 1, [129, 100], [1, 0], [0, 3], 5, 1]
"""Whole sequences, single steps, ragged ones, some without tokens."""


@dataclass(frozen=True)
class Layer:
    """Sizes, all different, and the published proportions made small: blocks of 4 sums, means of 2 and 8 sums."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 10
    rows: int = 320
    choice: dict[str, int] = field(
        default_factory=lambda: dict(
            block_size=12,
            mean_stride=3,
            mean_length=6,
            lse_stride=12,
            lse_length=24,
            top_blocks=6,
            init_blocks=1,
            local_blocks=2,
            dense_length=48,
        )
    )

    @property
    def attributes(self) -> dict[str, int]:
        """Of SelectBlocks."""
        c = self.choice
        return {**c, "block_slots": slots_of(c["top_blocks"], c["dense_length"], c["block_size"])}


def chosen(
    layer: Layer, query: Tensor, key: Tensor, ends: Sequence[int] = (), **planted: int
) -> tuple[list[list[list[int]]], Tensor]:
    """By the formulas, for one sequence [T, H, D] and [T, HK, D]: blocks of each token and key/value head, and how clearly the last of
    them was chosen, relative to its score.

    ends: Of each token, where its call ends: a call that ends before `dense_length` tokens reads all blocks; without them each token is
        a call.
    planted: Faults by name, which tests plant: `early`, a mean is taken so many keys before it is complete; `pool`, so many fine means for
        the right number; `tier`, 1: the normalizer has the fine means; `one_head`, 1: no sum over heads; `late`, 1: of equal scores the
        higher index; `other`, 1: the other key/value head's scores.
    """
    c, group, tokens = layer.choice, layer.heads // layer.kv_heads, len(query)
    query, key = query.double() / layer.dim**0.5, key.double()
    found: list[list[list[int]]] = []
    gaps = torch.full((tokens, layer.kv_heads), torch.inf)

    def logits(stride: int, width: int) -> list[Tensor]:
        """Of each key/value head: queries [T, G] times all means, [T, G, J]."""
        means = torch.stack([key[j : j + width].mean(0) for j in range(0, tokens, stride)])  # [J, HK, D]
        kept = means.flip(1) if planted.get("other") else means
        own = query.unflatten(1, (layer.kv_heads, group))
        return [own[:, head] @ kept[:, head].T for head in range(layer.kv_heads)]

    def complete(p: int, stride: int, width: int) -> int:
        return len([j for j in range(0, p + 1, stride) if j + width - 1 - planted.get("early", 0) <= p])

    tier = (c["mean_stride"], c["mean_length"]), (c["lse_stride"], c["lse_length"])
    tier = (tier[0], tier[0]) if planted.get("tier") else tier
    fine, coarse = (logits(*each) for each in tier)
    for p in range(tokens):
        found.append([])
        own = p // c["block_size"]
        for head in range(layer.kv_heads):
            if (ends[p] if ends else p + 1) < c["dense_length"]:
                found[-1].append(list(range(own + 1)))
                continue
            some = slice(0, 1 if planted.get("one_head") else None)
            a = fine[head][p, some, : complete(p, *tier[0])]
            b = coarse[head][p, some, : complete(p, *tier[1])]
            total = (a - b.logsumexp(-1, keepdim=True)).exp().sum(0)
            per, shared = c["block_size"] // c["mean_stride"], c["mean_length"] // c["mean_stride"]
            width = planted.get("pool", per + shared - 1)
            scores = []
            for block in range(own + 1):
                end = per * block + per
                of = total[max(0, end - width) : end]
                scores.append(float(of.max()) if len(of) else 0.0)
            always = {n for n in range(own + 1) if n < c["init_blocks"] or n >= own - c["local_blocks"]}
            sign = -1 if planted.get("late") else 1
            rest = sorted(set(range(own + 1)) - always, key=lambda n: (-scores[n], sign * n))
            take = max(0, c["top_blocks"] - len(always))
            found[-1].append(sorted(always | set(rest[:take])))
            if take and len(rest) > take:
                first, second = scores[rest[take - 1]], scores[rest[take]]
                gaps[p, head] = (first - second) / max(first, 1e-30)
    return found, gaps


def attended(
    layer: Layer, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Sequence[Sequence[int]]]
) -> Tensor:
    """Outputs [T, H, D] of one sequence by the definition, in float64."""
    group, size = layer.heads // layer.kv_heads, layer.choice["block_size"]
    output = torch.zeros(query.shape, dtype=torch.float64)
    query, key, value = query.double() / layer.dim**0.5, key.double(), value.double()
    for p in range(len(query)):
        for own in range(layer.kv_heads):
            heads = slice(own * group, own * group + group)
            seen = torch.tensor([s for b in blocks[p][own] for s in range(b * size, min(b * size + size, p + 1))])
            weights = (query[p, heads] @ key[seen, own].T).softmax(-1)  # [G, seen]
            output[p, heads] = weights @ value[seen, own]
    return output


@dataclass(frozen=True)
class Call:
    """One call: padded inputs with NaN where there is no token, and what must come out.

    blocks: [B, T, HK, slots], -1 where there is none.
    gaps: How clear the choice was, [B, T, HK].
    """

    feeds: dict[str, Tensor]
    blocks: Tensor
    gaps: Tensor
    output: Tensor


_defined: dict[str, tuple[Any, ...]] = {}
"""By what a layer and its sequences are made of: the same are asked for in place and apart."""


def calls(
    layer: Layer, splits: Sequence[Split], dtype: torch.dtype = torch.float32, batch: int = 2, seed: int = 0
) -> Iterator[Call]:
    """The calls that `splits` (tokens of all sequences, or of each) cut random sequences into."""
    counts = torch.tensor([s if isinstance(s, list) else [s] * batch for s in splits])  # [calls, B]
    longest = int(counts.sum(0).max())
    ends: list[list[int]] = [[] for _ in range(batch)]
    if layer.choice.get("switch_by_call"):
        for own, row in zip(ends, counts.T.tolist(), strict=True):
            for new in row:
                own.extend([len(own) + new] * new)
            own.extend([longest] * (longest - len(own)))  # of no call
    asked = layer, longest, ends, dtype, batch, seed
    if repr(asked) not in _defined:
        _defined[repr(asked)] = _define(*asked)
    whole, made, outputs = _defined[repr(asked)]
    slots, past = layer.attributes["block_slots"], torch.zeros(batch, dtype=torch.int64)
    for new in counts:
        tokens = max(int(new.max()), 1)
        feeds = {n: torch.full((batch, tokens, *x.shape[2:]), torch.nan, dtype=dtype) for n, x in whole.items()}
        blocks = torch.full((batch, tokens, layer.kv_heads, slots), -1, dtype=torch.int32)
        gaps = torch.full((batch, tokens, layer.kv_heads), torch.inf)
        output = torch.zeros(batch, tokens, layer.heads, layer.dim, dtype=torch.float64)
        for row, count in enumerate(new.tolist()):
            start = int(past[row])
            for name, x in whole.items():
                feeds[name][row, :count] = x[row, start : start + count]
            for t in range(count):
                for head, own in enumerate(made[row][0][start + t]):
                    blocks[row, t, head, : len(own)] = torch.tensor(own, dtype=torch.int32)
            gaps[row, :count] = made[row][1][start : start + count]
            output[row, :count] = outputs[row][start : start + count]
        yield Call({**feeds, "new_tokens": new, "past_length": past}, blocks, gaps, output)
        past = past + new


def _define(
    layer: Layer, longest: int, ends: list[list[int]], dtype: torch.dtype, batch: int, seed: int
) -> tuple[dict[str, Tensor], list[tuple[list[list[list[int]]], Tensor]], list[Tensor]]:
    """Random sequences, their blocks and their outputs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int) -> Tensor:
        return torch.randn(batch, longest, heads, layer.dim, generator=generator).to(dtype)

    whole = {"query": 2 * normal(layer.heads), "key": normal(layer.kv_heads), "value": normal(layer.kv_heads)}
    made = [chosen(layer, whole["query"][b], whole["key"][b], ends[b]) for b in range(batch)]
    query, key, value = whole.values()
    return whole, made, [attended(layer, query[b], key[b], value[b], made[b][0]) for b in range(batch)]
