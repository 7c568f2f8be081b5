"""The function body of still::Attention against the definition: outputs and every state tensor."""

from collections.abc import Sequence
from typing import Any

import onnx
import pytest
import torch
from onnx import inliner

from still_kernels.attention.spec import ATTENTION
from tests.still_graphs import node_model as nodes
from tests.still_graphs.node_model import WRONG_COUNTS, close, refused, session, value
from tests.still_kernels.attention.inputs import SPLITS, Layer, Split, calls
from tests.tolerances import REFERENCE


def node_model(layer: Layer, dtype: torch.dtype, layers: int = 1, opset: int = 23) -> onnx.ModelProto:
    """A model of `layers` nodes in a row, each of which feeds the next one's query, bodies attached."""
    sizes = {"H": layer.heads, "HK": layer.kv_heads, "D": layer.dim}
    return nodes.node_model(ATTENTION, sizes, dtype, opset=opset, layers=layers)


class Runner(nodes.NodeOfStates):
    """Runs one node; outputs and states of each call."""

    def __init__(
        self, layer: Layer, dtype: torch.dtype, batch: int, in_place: bool, opset: int = 23, **options: Any
    ) -> None:
        rows = torch.zeros(batch, layer.kv_heads, layer.rows, layer.dim, dtype=dtype)
        states = {"key": rows, "value": rows.clone()}
        super().__init__(node_model(layer, dtype, opset=opset), states, in_place, **options)

    def __call__(self, feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"output": super().__call__(feeds, feeds["query"]), **self.states()}


def check(
    layer: Layer,
    splits: Sequence[Split] = SPLITS,
    dtype: torch.dtype = torch.float32,
    in_place: bool = False,
    sharpness: float = 2.0,
    **options: Any,
) -> None:
    """Every output and state of every call."""
    runner = Runner(layer, dtype, 2, in_place, **options)
    for number, call in enumerate(calls(layer, splits, dtype, sharpness=sharpness)):
        found = runner(call.feeds)
        close(found["output"], call.output, REFERENCE[dtype], f"output of call {number}")
        assert torch.equal(found["key"], call.state.key) and torch.equal(found["value"], call.state.value), number


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "apart"])
@pytest.mark.parametrize("layer", [Layer(), Layer(heads=2), Layer(heads=7, kv_heads=1), Layer(9, 3, 64, 300)], ids=str)
def test_body_equals_definition(layer: Layer, in_place: bool) -> None:
    check(layer, SPLITS if layer.rows < 100 else [130, 1, 1, [60, 7], [1, 0], 90], in_place=in_place)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float16, "in_place": True},
        {"dtype": torch.bfloat16, "in_place": True},
        {"sharpness": 30.0},
        {"opset": 24},
    ],
    ids=str,
)
def test_half_precision_logits_far_apart_and_a_newer_opset(options: dict[str, Any]) -> None:
    check(Layer(), **options)


def test_what_is_not_filled_is_not_read() -> None:
    """Rows of the cache behind the longest row may hold anything."""
    layer = Layer()
    runner = Runner(layer, torch.float32, 2, False)
    rubbish = torch.full((2, layer.kv_heads, layer.rows, layer.dim), torch.nan)
    runner.state = {name: value(rubbish.clone()) for name in ("key", "value")}
    for call in calls(layer, [5, 1, 7], torch.float32):
        close(runner(call.feeds)["output"], call.output, REFERENCE[torch.float32], "output")


@pytest.mark.parametrize("changes", WRONG_COUNTS, ids=str)
def test_counts_out_of_range_are_refused(changes: dict[str, list[int]]) -> None:
    """Also a row that outgrows the cache."""
    runner = Runner(Layer(rows=12), torch.float32, 2, False)
    call = next(iter(calls(Layer(rows=12), [5], torch.float32)))
    with refused():
        runner(call.feeds | {name: torch.tensor(counts) for name, counts in changes.items()})


def test_cache_is_not_expanded_to_query_heads() -> None:
    """No node makes more of the cache than one copy of its filled rows, whatever the number of query heads."""
    model = node_model(Layer(heads=8, kv_heads=2), torch.float32)
    inferred = onnx.shape_inference.infer_shapes(inliner.inline_local_functions(model))
    grown = [n.op_type for n in inferred.graph.node if n.op_type in ("Expand", "Tile") and "past" in "".join(n.input)]
    assert not grown
    products = [n for n in inferred.graph.node if n.op_type == "MatMul"]
    assert len(products) == 2


def test_steps_of_many_layers_share_their_indices(tmp_path: Any) -> None:
    """What depends on counts only is computed once, not once a layer."""
    sizes = []
    for layers in (2, 6):
        path = str(tmp_path / f"{layers}.onnx")
        session(node_model(Layer(), torch.float32, layers), save=path)
        sizes.append(len(onnx.load(path).graph.node))
    assert (sizes[1] - sizes[0]) / 4 <= 32
