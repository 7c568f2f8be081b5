"""The native CPU kernels of still::SelectBlocks and still::BlockAttention, in ONNX Runtime, against the formulas and the bodies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from still_kernels.block_attention.spec import BLOCK_ATTENTION
from still_kernels.select_blocks.spec import SELECT_BLOCKS
from tests.still_graphs import test_block_attention as body
from tests.still_graphs.node_model import WRONG_COUNTS, session, value
from tests.still_kernels.block_attention.inputs import SPLITS, Layer, Split, calls
from tests.still_kernels.block_attention.test_block_attention import LAYERS

CHOICE = Layer().choice
LONG: list[Split] = [270, 1, [0, 9], 1, [1, 12], [9, 1], [1, 0]]
SINGLE: list[Split] = [[60, 1], *[1] * 90]
"""One by one, over borders of means and blocks."""
CASES: list[tuple[Layer, list[Split]]] = [
    *((layer, splits) for layer in LAYERS for splits in (SPLITS, LONG, SINGLE)),
    (Layer(heads=40, kv_heads=1, dim=5, rows=320), LONG),
    (Layer(9, 3, 17, 330, {**CHOICE, "local_blocks": 5, "top_blocks": 7}), LONG),
    (Layer(4, 2, 16, 700, {**CHOICE, "block_size": 150, "top_blocks": 4, "dense_length": 300}), [640, 1, [5, 9]]),
    (Layer(6, 2, 33, 330, {**CHOICE, "mean_length": 3, "top_blocks": 9, "init_blocks": 0}), LONG),
]
"""A group of more heads than a task has columns; nothing scored: as many blocks as are chosen always; blocks longer than a tile."""


@pytest.mark.parametrize("layer, splits", CASES, ids=str)
def test_kernels_equal_the_formulas(library: str, layer: Layer, splits: list[Split]) -> None:
    body.check(layer, [True, False], splits, library=library, threads=2)


@pytest.mark.usefixtures("instructions")
def test_instruction_sets(library: str) -> None:
    body.check(Layer(6, 2, 24), [True], LONG, library=library)
    body.check_half(Layer(6, 2, 24), LONG, library=library)


def outputs(library: str, layer: Layer, splits: list[Split], **options: Any) -> torch.Tensor:
    """Of both nodes, row after row of each sequence's tokens: blocks, then outputs with these, on states full of NaN."""
    select = body.Runner(SELECT_BLOCKS, layer, torch.float32, layer.attributes, True, library=library, **options)
    size = {"block_size": layer.choice["block_size"]}
    attend = body.Runner(BLOCK_ATTENTION, layer, torch.float32, size, True, library=library, **options)
    for runner in (select, attend):
        runner.state = {
            name: value(torch.full(x.shape(), torch.nan, dtype=torch.float32)) for name, x in runner.state.items()
        }
    found: list[list[torch.Tensor]] = [[], []]
    for call in calls(layer, splits):
        blocks = select(call.feeds)
        output = attend({**call.feeds, "blocks": blocks})
        for row, count in enumerate(call.feeds["new_tokens"].tolist()):
            found[row].append(torch.cat([blocks[row, :count].flatten(1), output[row, :count].flatten(1)], 1))
            assert (blocks[row, count:] == -1).all() and not output[row, count:].any()
    return torch.cat([torch.cat(row) for row in found])


def test_neither_threads_nor_splits_change_the_choice_and_what_is_not_filled_is_not_read(library: str) -> None:
    layer = Layer(6, 2, 16, 320)
    whole = outputs(library, layer, [300])
    assert whole.isfinite().all()
    assert torch.equal(whole, outputs(library, layer, [300], threads=2))
    pieces = outputs(library, layer, [70, 1, 129, *[1] * 20, 80], threads=2)
    slots = layer.kv_heads * layer.attributes["block_slots"]
    assert torch.equal(whole[:, :slots], pieces[:, :slots])
    assert (whole - pieces).abs().max() <= 2e-6


def test_few_tokens_are_single_tokens_bit_for_bit(library: str) -> None:
    layer = Layer(6, 2, 16, 320)
    assert torch.equal(outputs(library, layer, [200, 5, 8]), outputs(library, layer, [200, *[1] * 13]))


def test_of_equal_scores_the_first_is_taken(library: str) -> None:
    layer = Layer()
    select = body.Runner(SELECT_BLOCKS, layer, torch.float32, layer.attributes, True, library=library)
    ones = {"query": torch.ones(2, 120, 6, layer.dim), "key": torch.ones(2, 120, 2, layer.dim)}
    found = select({**ones, "new_tokens": torch.tensor([120, 120]), "past_length": torch.tensor([0, 0])})
    assert found[0, 119, 0].tolist()[:6] == [0, 1, 2, 7, 8, 9]


def test_blocks_in_any_order(library: str) -> None:
    """Lists out of order, with holes, are the same choice."""
    layer = Layer()
    size = {"block_size": layer.choice["block_size"]}
    runs = [body.Runner(BLOCK_ATTENTION, layer, torch.float32, size, True, library=library) for _ in range(2)]
    for call in calls(layer, SPLITS):
        first = runs[0]({**call.feeds, "blocks": call.blocks})
        other = runs[1]({**call.feeds, "blocks": call.blocks.flip(-1).contiguous()})
        assert (first - other).abs().max() <= 2e-6


@pytest.mark.parametrize("spec", [SELECT_BLOCKS, BLOCK_ATTENTION], ids=lambda s: s.name)
def test_the_kernels_take_the_nodes(library: str, tmp_path: Path, spec: Any) -> None:
    layer = Layer()
    attributes = layer.attributes if spec is SELECT_BLOCKS else {"block_size": layer.choice["block_size"]}
    path = str(tmp_path / "run.onnx")
    session(body.node_model(spec, layer, torch.float32, attributes), save=path, library=library)
    assert [n.op_type for n in onnx.load(path).graph.node] == [spec.name]


@pytest.mark.parametrize("spec", [SELECT_BLOCKS, BLOCK_ATTENTION], ids=lambda s: s.name)
@pytest.mark.parametrize("changes", WRONG_COUNTS, ids=str)
def test_wrong_counts_are_refused(library: str, spec: Any, changes: dict[str, Any]) -> None:
    layer = Layer(rows=12)
    attributes = layer.attributes if spec is SELECT_BLOCKS else {"block_size": 12}
    runner = body.Runner(spec, layer, torch.float32, attributes, False, library=library)
    call = next(calls(layer, [5]))
    feeds = {**call.feeds, "blocks": call.blocks}
    with pytest.raises(Exception, match=rf"{spec.name}: sequence [01] (has past_length|grows to 65 tokens)"):
        runner(feeds | {name: torch.tensor(counts) for name, counts in changes.items()})
