"""still::SelectBlocks and still::BlockAttention against their formulas in float64, in any split; faults that must be seen; refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from still_graphs.errors import CapacityError, ShapeError
from still_kernels.attention.meaning import AttentionState
from still_kernels.block_attention.meaning import Inputs, block_attention
from still_kernels.select_blocks.meaning import Inputs as SelectInputs
from still_kernels.select_blocks.meaning import naive_select_blocks
from tests.still_kernels.block_attention.inputs import SPLITS, Layer, calls, chosen

LAYERS = [
    Layer(),
    Layer(heads=4, kv_heads=4, dim=7),
    Layer(
        heads=5,
        kv_heads=1,
        choice={**Layer().choice, "mean_length": 9, "lse_stride": 9, "lse_length": 27, "local_blocks": 0},
    ),
    Layer(dim=9, choice={**Layer().choice, "dense_length": 96, "switch_by_call": 1}),
]
CLEAR = 1e-5
"""Choices whose lead is larger must be the same."""


def same(found: torch.Tensor, expected: torch.Tensor, gaps: torch.Tensor) -> None:
    wrong = (found != expected).any(-1)
    assert not (wrong & (gaps > CLEAR)).any()
    assert float(wrong.float().mean()) < 1e-3


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_blocks_and_outputs_are_those_of_the_formulas(layer: Layer) -> None:
    sums = torch.zeros(2, layer.kv_heads, -(-layer.rows // layer.choice["mean_stride"]), layer.dim)
    sums[:, :, -1] = torch.nan  # what is not filled is not read
    state = AttentionState.empty(2, layer.kv_heads, layer.dim, layer.rows)
    for call in calls(layer, SPLITS):
        f = call.feeds
        counts = (f["new_tokens"], f["past_length"])
        blocks, sums = naive_select_blocks(SelectInputs(f["query"], f["key"], *counts, **layer.attributes), sums)
        same(blocks, call.blocks, call.gaps)
        inputs = Inputs(f["query"], f["key"], f["value"], f["new_tokens"], call.blocks, layer.choice["block_size"])
        output, state = block_attention(inputs, state)
        real = torch.arange(output.shape[1]) < f["new_tokens"][:, None]
        if real.any():
            assert (output[real] - call.output[real]).abs().max() <= 5e-6 * call.output[real].abs().max()
        assert not output[~real].any()


def test_a_call_decides_for_all_of_its_tokens() -> None:
    """A prompt of at least `dense_length` tokens chooses from its first one on, as the published code does; a shorter one and each step
    read all blocks. The rule by tokens would be seen."""
    layer = LAYERS[3]
    generator = torch.Generator().manual_seed(4)
    query, key = (torch.randn(130, n, layer.dim, generator=generator) for n in (layer.heads, layer.kv_heads))
    sums, past, found = torch.zeros(1, layer.kv_heads, 60, layer.dim), 0, []
    for new in (129, 1):
        given = (x[None, past : past + new] for x in (2 * query, key))
        counts = torch.tensor([new]), torch.tensor([past])
        blocks, sums = naive_select_blocks(SelectInputs(*given, *counts, **layer.attributes), sums)
        found += [[[n for n in head if n >= 0] for head in token] for token in blocks[0].tolist()]
        past += new
    right, gaps = chosen(layer, 2 * query, key, [129] * 129 + [130])
    by_token, _ = chosen(layer, 2 * query, key)
    clear = [(t, h) for t in range(130) for h in range(layer.kv_heads) if gaps[t, h] > CLEAR]
    assert all(found[t][h] == right[t][h] for t, h in clear)
    assert sum(found[t][h] != by_token[t][h] for t, h in clear) >= 40
    assert right[:95] != by_token[:95] and right[95:] == by_token[95:]
    short = naive_select_blocks(
        SelectInputs(query[None, :95], key[None, :95], torch.tensor([95]), torch.tensor([0]), **layer.attributes),
        torch.zeros(1, layer.kv_heads, 60, layer.dim),
    )[0]
    assert short[0, 94, 0].tolist() == [*range(8)]


def test_of_equal_scores_the_first_is_taken() -> None:
    layer = Layer()
    query, key = torch.ones(120, 6, layer.dim), torch.ones(120, 2, layer.dim)
    inputs = SelectInputs(query[None], key[None], torch.tensor([120]), torch.tensor([0]), **layer.attributes)
    found = naive_select_blocks(inputs, torch.zeros(1, 2, 40, layer.dim))[0][0]
    assert found[119, 0].tolist()[:6] == [0, 1, 2, 7, 8, 9] == chosen(layer, query, key)[0][119][0]
    assert chosen(layer, query, key, late=1)[0][119][0] != [0, 1, 2, 7, 8, 9]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_size": 10}, r"block_size=10 must be a multiple of mean_stride=3"),
        ({"mean_length": 7}, r"mean_length=7 must be a multiple of mean_stride=3"),
        ({"lse_length": 25}, r"lse_length=25 must be a multiple of lse_stride=12"),
        ({"top_blocks": 3}, r"top_blocks=3 must be at least init_blocks=1 \+ local_blocks=2 \+ 1"),
        ({"dense_length": 20}, r"dense_length=20 must be at least lse_length=24"),
        ({"block_slots": 5}, r"block_slots=5 must be 6"),
        ({"mean_stride": 0}, r"mean_stride=0 must be at least 1"),
        ({"switch_by_call": 2}, r"switch_by_call=2 must be 0 or 1"),
        (
            {"switch_by_call": 1, "local_blocks": 0, "init_blocks": 0},
            r"lse_length=24 must be at most 12 with switch_by_call",
        ),
    ],
)
def test_attributes_that_do_not_fit(changes: dict[str, int], message: str) -> None:
    query, key = torch.zeros(1, 2, 6, 10), torch.zeros(1, 2, 2, 10)
    given: dict[str, Any] = {**Layer().attributes, **changes}
    inputs = SelectInputs(query, key, torch.tensor([2]), torch.tensor([0]), **given)
    with pytest.raises(ShapeError, match=message):
        naive_select_blocks(inputs, torch.zeros(1, 2, 4, 10))


def test_states_that_are_too_small() -> None:
    query, key = torch.zeros(1, 5, 6, 10), torch.zeros(1, 5, 2, 10)
    new, past = torch.tensor([5]), torch.tensor([0])
    with pytest.raises(ShapeError, match="grows to 5 tokens; key_sum has 1 rows of 3"):
        naive_select_blocks(SelectInputs(query, key, new, past, **Layer().attributes), torch.zeros(1, 2, 1, 10))
    with pytest.raises(ShapeError, match=r"blocks: expected \[1, 5, 2\] and slots, got \[1, 5, 1, 3\]"):
        Inputs(query, key, key, new, torch.zeros(1, 5, 1, 3), 12).check()
    with pytest.raises(CapacityError):
        block_attention(Inputs(query, key, key, new, torch.zeros(1, 5, 2, 3), 12), AttentionState.empty(1, 2, 10, 4))
