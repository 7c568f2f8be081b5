"""The function bodies of still::SelectBlocks and still::BlockAttention against the formulas: outputs and every state tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import pytest
import torch

from still_graphs.errors import UnsupportedError
from still_graphs.ops import OpSpec
from still_kernels.block_attention.spec import BLOCK_ATTENTION
from still_kernels.select_blocks.meaning import Inputs, naive_select_blocks
from still_kernels.select_blocks.spec import SELECT_BLOCKS
from tests.still_graphs import node_model as nodes
from tests.still_graphs.node_model import WRONG_COUNTS, close, refused
from tests.still_kernels.block_attention.inputs import SPLITS, Layer, Split, calls
from tests.still_kernels.block_attention.test_block_attention import LAYERS, same
from tests.tolerances import REFERENCE


def node_model(spec: OpSpec, layer: Layer, dtype: torch.dtype, attributes: dict[str, int]) -> onnx.ModelProto:
    """A model of one node, body attached; `N` and the like are free."""
    sizes = {"H": layer.heads, "HK": layer.kv_heads, "D": layer.dim, **attributes}
    return nodes.node_model(spec, sizes, dtype, **attributes)


class Runner(nodes.NodeOfStates):
    """Runs a node whose states start empty."""

    def __init__(
        self, spec: OpSpec, layer: Layer, dtype: torch.dtype, attributes: dict[str, int], in_place: bool, **options: Any
    ) -> None:
        self.layer = layer
        rows = {"key_sum": -(-layer.rows // layer.choice["mean_stride"])}
        states = {
            s.name: torch.zeros(
                2,
                layer.kv_heads,
                rows.get(s.name, layer.rows),
                layer.dim,
                dtype=dtype if s.dtype == "T" else torch.float32,
            )
            for s in spec.states
        }
        model = node_model(spec, layer, dtype, attributes)
        super().__init__(model, states, in_place, spec.outputs[0].name, **options)

    def __call__(self, feeds: dict[str, torch.Tensor]) -> torch.Tensor:
        blocks = (*feeds["query"].shape[:2], self.layer.kv_heads, self.layer.attributes["block_slots"])
        like = feeds["query"] if self.first == "output" else torch.empty(blocks, dtype=torch.int32)
        return super().__call__(feeds, like)


def check(layer: Layer, places: Sequence[bool], splits: Sequence[Split] = SPLITS, **options: Any) -> None:
    """Both nodes, in float32, with states in place or apart: choices, outputs and the sums of keys after each call."""
    size = {"block_size": layer.choice["block_size"]}
    pairs = [
        (
            Runner(SELECT_BLOCKS, layer, torch.float32, layer.attributes, in_place, **options),
            Runner(BLOCK_ATTENTION, layer, torch.float32, size, in_place, **options),
        )
        for in_place in places
    ]
    sums = torch.zeros(2, layer.kv_heads, -(-layer.rows // layer.choice["mean_stride"]), layer.dim)
    for call in calls(layer, splits):
        f = call.feeds
        given = Inputs(f["query"], f["key"], f["new_tokens"], f["past_length"], **layer.attributes)
        _, sums = naive_select_blocks(given, sums)
        for select, attend in pairs:
            same(select(call.feeds), call.blocks, call.gaps)
            assert (select.states()["key_sum"] - sums).abs().max() <= 2e-6 * sums.abs().max()
            output = attend({**call.feeds, "blocks": call.blocks})
            assert (output - call.output).abs().max() <= 5e-6 * call.output.abs().max().clamp_min(1e-6)


def check_half(layer: Layer, splits: Sequence[Split] = SPLITS, **options: Any) -> None:
    """The choices are those of the definition on the rounded inputs, in float32."""
    dtype = torch.float16
    select = Runner(SELECT_BLOCKS, layer, dtype, layer.attributes, True, **options)
    attend = Runner(BLOCK_ATTENTION, layer, dtype, {"block_size": layer.choice["block_size"]}, True, **options)
    for call in calls(layer, splits, dtype):
        same(select(call.feeds), call.blocks, call.gaps)
        output = attend({**call.feeds, "blocks": call.blocks}).double()
        close(output, call.output, REFERENCE[dtype], "output")


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "apart"])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_bodies_equal_the_formulas(layer: Layer, in_place: bool) -> None:
    check(layer, [in_place])


def test_half_precision() -> None:
    check_half(Layer())


@pytest.mark.parametrize("spec", [SELECT_BLOCKS, BLOCK_ATTENTION], ids=lambda s: s.name)
@pytest.mark.parametrize("changes", WRONG_COUNTS, ids=str)
def test_counts_out_of_range_are_refused(spec: OpSpec, changes: dict[str, list[int]]) -> None:
    layer = Layer(rows=12)
    attributes = layer.attributes if spec is SELECT_BLOCKS else {"block_size": 12}
    runner = Runner(spec, layer, torch.float32, attributes, False)
    call = next(calls(layer, [5]))
    feeds = {**call.feeds, "blocks": call.blocks}
    runner(feeds)
    with refused():
        runner(feeds | {name: torch.tensor(counts) for name, counts in changes.items()})


def test_attributes_that_do_not_fit_have_no_body() -> None:
    with pytest.raises(UnsupportedError, match=r"top_blocks=3 must be at least init_blocks=1 \+ local_blocks=2 \+ 1"):
        node_model(SELECT_BLOCKS, Layer(), torch.float32, {**Layer().attributes, "top_blocks": 3})
    with pytest.raises(UnsupportedError, match="block_size=0 must be at least 1"):
        node_model(BLOCK_ATTENTION, Layer(), torch.float32, {"block_size": 0})
