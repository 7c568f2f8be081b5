"""The function bodies of still::SelectBlocks and still::BlockAttention against the formulas: outputs and every state tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from still_graphs.errors import UnsupportedError
from still_graphs.ops import DOMAIN, OpSpec
from still_kernels.block_attention.spec import BLOCK_ATTENTION
from still_kernels.select_blocks.meaning import Inputs, naive_select_blocks
from still_kernels.select_blocks.spec import SELECT_BLOCKS
from tests.block_cases import SPLITS, Layer, Split, calls
from tests.still_graphs.steps import attach_functions
from tests.still_graphs.test_functions import ELEMENT, WRONG_COUNTS, close, ort, session, value
from tests.still_kernels.test_block_attention import LAYERS, same
from tests.tolerances import REFERENCE


def node_model(spec: OpSpec, layer: Layer, dtype: torch.dtype, attributes: dict[str, int]) -> onnx.ModelProto:
    """A model of one node, body attached; `N` and the like are free."""
    sizes: dict[Any, Any] = {"H": layer.heads, "HK": layer.kv_heads, "D": layer.dim, **attributes}
    kinds = {"T": ELEMENT[dtype], "float32": 1, "int64": TensorProto.INT64, "int32": TensorProto.INT32}
    sides = [
        [
            helper.make_tensor_value_info(name, kinds[tensor.dtype], [sizes.get(d, d) for d in tensor.shape])
            for name, tensor in zip(names, tensors, strict=True)
        ]
        for names, tensors in ((spec.input_names(), spec.all_inputs()), (spec.output_names(), spec.all_outputs()))
    ]
    given: dict[str, Any] = dict(attributes)
    node = helper.make_node(spec.name, spec.input_names(), spec.output_names(), domain=DOMAIN, **given)
    graph = helper.make_graph([node], "still", sides[0], sides[1])
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    assert attach_functions(model) == 1
    return model


class Runner:
    """Runs a node call after call; with `in_place` past and present are one buffer, else present starts as NaN."""

    def __init__(
        self,
        spec: OpSpec,
        layer: Layer,
        dtype: torch.dtype,
        attributes: dict[str, int],
        in_place: bool,
        **options: Any,
    ) -> None:
        self.spec, self.in_place = spec, in_place
        self.session = session(node_model(spec, layer, dtype, attributes), **options)
        rows = {"key_sum": -(-layer.rows // layer.choice["mean_stride"])}
        self.state = {
            s.name: value(
                torch.zeros(
                    2,
                    layer.kv_heads,
                    rows.get(s.name, layer.rows),
                    layer.dim,
                    dtype=dtype if s.dtype == "T" else torch.float32,
                )
            )
            for s in spec.states
        }

    def __call__(self, feeds: dict[str, torch.Tensor]) -> torch.Tensor:
        binding = self.session.io_binding()
        binding.bind_output(self.spec.outputs[0].name)
        for t in self.spec.inputs:
            binding.bind_ortvalue_input(t.name, value(feeds[t.name]))
        made = {}
        for name, past in self.state.items():
            binding.bind_ortvalue_input(f"past_{name}", past)
            fresh = value(torch.full(past.shape(), torch.nan, dtype=torch.from_numpy(past.numpy()).dtype))
            made[name] = past if self.in_place else fresh
            binding.bind_ortvalue_output(f"present_{name}", made[name])
        self.session.run_with_iobinding(binding)
        self.state = made
        return torch.from_numpy(binding.get_outputs()[0].numpy().copy())


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
            found = torch.from_numpy(select.state["key_sum"].numpy())
            assert (found - sums).abs().max() <= 2e-6 * sums.abs().max()
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
    ort.set_default_logger_severity(4)
    try:
        with pytest.raises(Exception, match=r"out_of_range|invalid ind"):
            runner(feeds | {name: torch.tensor(counts) for name, counts in changes.items()})
    finally:
        ort.set_default_logger_severity(2)


def test_attributes_that_do_not_fit_have_no_body() -> None:
    with pytest.raises(UnsupportedError, match=r"top_blocks=3 must be at least init_blocks=1 \+ local_blocks=2 \+ 1"):
        node_model(SELECT_BLOCKS, Layer(), torch.float32, {**Layer().attributes, "top_blocks": 3})
    with pytest.raises(UnsupportedError, match="block_size=0 must be at least 1"):
        node_model(BLOCK_ATTENTION, Layer(), torch.float32, {"block_size": 0})
