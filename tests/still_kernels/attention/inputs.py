"""Calls of still::Attention for every form of it: layers, splits, and what the definition makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.attention.meaning import AttentionState
from still_kernels.codes import rounded

Split = int | list[int]
SPLITS: list[Split] = [5, 3, 1, 1, 1, [0, 3], [2, 9], [1, 1], [1, 0], [0, 0], 16, 4, 1, [1, 1]]
"""Whole rows, single steps, ragged rows, rows without tokens."""


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer and of its state; all differ."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 10
    rows: int = 64


@dataclass(frozen=True)
class Call:
    """One call: padded inputs with NaN where there is no token, and what must come out."""

    feeds: dict[str, Tensor]
    output: Tensor
    state: AttentionState


def quadratic(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal softmax attention over whole sequences, in at least float32."""
    wide, group = torch.promote_types(query.dtype, torch.float32), query.shape[2] // key.shape[2]
    q = query.transpose(1, 2).to(wide)
    k, v = (x.transpose(1, 2).repeat_interleave(group, dim=1).to(wide) for x in (key, value))
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    logits = (q @ k.transpose(-1, -2) * query.shape[3] ** -0.5).masked_fill(future, -torch.inf)
    return (logits.softmax(-1) @ v).transpose(1, 2).to(query.dtype)


def calls(
    layer: Layer,
    splits: Sequence[Split],
    dtype: torch.dtype,
    batch: int = 2,
    sharpness: float = 2.0,
    seed: int = 0,
    cache: str = "float",
) -> Iterator[Call]:
    """The calls that `splits` (tokens of all rows, or of each) cut random sequences into; outputs by the quadratic definition.

    With `cache` "int8" keys and values are rounded, and the states hold them as numbers.
    """
    counts = torch.tensor([s if isinstance(s, list) else [s] * batch for s in splits])  # [calls, B]
    generator = torch.Generator().manual_seed(seed)
    longest = int(counts.sum(0).max())

    def normal(heads: int) -> Tensor:
        return torch.randn(batch, longest, heads, layer.dim, generator=generator).to(dtype)

    whole = {"query": sharpness * normal(layer.heads), "key": normal(layer.kv_heads), "value": normal(layer.kv_heads)}
    if cache == "int8":
        whole |= {name: rounded(whole[name]) for name in ("key", "value")}
    expected = quadratic(**whole)
    state = AttentionState.empty(batch, layer.kv_heads, layer.dim, layer.rows, dtype)
    for new in counts:
        tokens = max(int(new.max()), 1)
        feeds = {n: torch.full((batch, tokens, *x.shape[2:]), torch.nan, dtype=dtype) for n, x in whole.items()}
        output = torch.zeros(batch, tokens, *expected.shape[2:], dtype=dtype)
        present = {"key": state.key.clone(), "value": state.value.clone()}
        for row, count in enumerate(new.tolist()):
            place = slice(int(state.length[row]), int(state.length[row]) + count)
            for name, x in whole.items():
                feeds[name][row, :count] = x[row, place]
            output[row, :count] = expected[row, place]
            for name, cache in present.items():
                cache[row, :, place] = whole[name][row, place].transpose(0, 1)
        feeds |= {"new_tokens": new, "past_length": state.length}
        state = AttentionState(**present, length=state.length + new)
        yield Call(feeds, output, state)
