"""The function body of still::Attention against the definition: outputs and every state tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper, inliner

from still_graphs.ops import DOMAIN
from still_kernels.attention.spec import ATTENTION
from tests.attention_cases import SPLITS, Layer, Split, calls
from tests.still_graphs.steps import attach_functions
from tests.still_graphs.test_functions import ELEMENT, WRONG_COUNTS, close, ort, session, value
from tests.tolerances import REFERENCE

STATES = ("key", "value")
NAMES = tuple(t.name for t in ATTENTION.inputs) + tuple(f"past_{name}" for name in STATES)
"""Inputs of a node that keeps rows as numbers."""


def node_model(layer: Layer, dtype: torch.dtype, layers: int = 1, opset: int = 23) -> onnx.ModelProto:
    """A model of `layers` nodes in a row (each feeds the next one's query), bodies attached."""
    sizes = {"H": layer.heads, "HK": layer.kv_heads, "D": layer.dim}
    kinds = {"T": ELEMENT[dtype], "float32": TensorProto.FLOAT, "int64": TensorProto.INT64}
    inputs, outputs, nodes = {}, [], []
    for number in range(layers):
        sides: list[list[str]] = []
        for names, tensors in (
            (NAMES, ATTENTION.all_inputs()),
            (ATTENTION.output_names()[: 1 + len(STATES)], ATTENTION.all_outputs()),
        ):
            sides.append([])
            for name, tensor in zip(names, tensors, strict=False):
                full = name if tensor.role == "count" else f"{name}.{number}"
                if name == "query" and number:
                    full = f"output.{number - 1}"
                sides[-1].append(full)
                info = helper.make_tensor_value_info(full, kinds[tensor.dtype], [sizes.get(d, d) for d in tensor.shape])
                if names is not NAMES:
                    outputs.append(info)
                elif not full.startswith("output"):
                    inputs[full] = info
        nodes.append(helper.make_node(ATTENTION.name, *sides, domain=DOMAIN))
    graph = helper.make_graph(nodes, "still", list(inputs.values()), outputs)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    assert attach_functions(model) == 1
    return model


class Runner:
    """Runs a one-layer model over IOBinding; with `in_place` past and present are one buffer, else present starts as NaN."""

    def __init__(self, layer: Layer, dtype: torch.dtype, batch: int, in_place: bool, opset: int = 23, **options: Any):
        self.session = session(node_model(layer, dtype, opset=opset), **options)
        self.in_place, self.dtype = in_place, dtype
        shape = (batch, layer.kv_heads, layer.rows, layer.dim)
        self.state = {name: value(torch.zeros(shape, dtype=dtype)) for name in ("key", "value")}

    def tensor(self, found: Any) -> torch.Tensor:
        if self.dtype == torch.bfloat16:
            return torch.utils.dlpack.from_dlpack(found._ortvalue.to_dlpack()).clone()
        return torch.from_numpy(found.numpy().copy())

    def __call__(self, feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        binding = self.session.io_binding()
        held = {name: value(tensor) for name, tensor in feeds.items()}
        for name, given in held.items():
            binding.bind_ortvalue_input(name if "_" in name else f"{name}.0", given)
        made = {"output": value(torch.full_like(feeds["query"], torch.nan))}
        for name, past in self.state.items():
            binding.bind_ortvalue_input(f"past_{name}.0", past)
            made[name] = past if self.in_place else value(torch.full_like(self.tensor(past), torch.nan))
        for name, result in made.items():
            binding.bind_ortvalue_output(f"{name if name == 'output' else f'present_{name}'}.0", result)
        self.session.run_with_iobinding(binding)
        self.state = {name: made[name] for name in self.state}
        return {name: self.tensor(result) for name, result in made.items()}


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    check(Layer(), dtype=dtype, in_place=True)


def test_logits_far_apart() -> None:
    check(Layer(), sharpness=30.0)


def test_newer_opset() -> None:
    check(Layer(), opset=24)


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
    ort.set_default_logger_severity(4)
    try:
        with pytest.raises(Exception, match=r"out_of_range|invalid ind"):
            runner(call.feeds | {name: torch.tensor(counts) for name, counts in changes.items()})
    finally:
        ort.set_default_logger_severity(2)


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
