"""The function body of still::CausalConv against a loop: outputs and states."""

from typing import Any

import onnx
import pytest
import torch

from still_graphs.errors import UnsupportedError
from still_kernels.causal_conv.meaning import empty_state
from still_kernels.causal_conv.spec import CAUSAL_CONV
from tests.still_graphs.node_model import StatefulNode, close, fused, node_model, refused
from tests.still_kernels.causal_conv.inputs import LAYERS, SPLITS, Layer, calls
from tests.tolerances import REFERENCE


def layer_model(
    layer: Layer, dtype: torch.dtype = torch.float32, past: int | None = None, **asked: Any
) -> onnx.ModelProto:
    """A model of one node of the layer."""
    sizes = {"C": layer.channels, "K": layer.taps, "P": layer.taps - 1 if past is None else past}
    absent = () if layer.bias else ("bias",)
    return node_model(CAUSAL_CONV, sizes, dtype, absent, activation=layer.activation, **asked)


def check(layer: Layer, dtype: torch.dtype = torch.float32, in_place: bool = False, **asked: Any) -> None:
    """Output and state of every call."""
    state = empty_state(2, layer.channels, layer.taps, dtype)
    node = StatefulNode(CAUSAL_CONV, layer_model(layer, dtype, **asked), state, in_place)
    for number, call in enumerate(calls(layer, SPLITS, dtype)):
        feeds = {t.name: x for t in CAUSAL_CONV.inputs if (x := getattr(call.inputs, t.name)) is not None}
        output, present = node(feeds, call.output.to(dtype))
        close(output, call.output, REFERENCE[dtype], f"output of call {number}")
        assert torch.equal(present.double(), call.state), number


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "apart"])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_body_equals_the_loop(layer: Layer, in_place: bool) -> None:
    check(layer, in_place=in_place)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision(dtype: torch.dtype) -> None:
    check(Layer(bias=True), dtype, in_place=True)


@fused
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "apart"])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_body_around_the_op_of_another_domain(layer: Layer, in_place: bool, domain: str, asked: dict[str, Any]) -> None:
    nodes = layer_model(layer, **asked).functions[0].node
    assert [n.domain for n in nodes if n.op_type == "CausalConvWithState"] == [domain]
    check(layer, in_place=in_place, **asked)


@fused
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_around_it(dtype: torch.dtype, domain: str, asked: dict[str, Any]) -> None:
    check(Layer(bias=True), dtype, in_place=True, **asked)


@pytest.mark.parametrize("counts", [[5, -1], [5, 6], [5, 2**62]], ids=str)
def test_counts_out_of_range_are_refused(counts: list[int]) -> None:
    node = StatefulNode(CAUSAL_CONV, layer_model(Layer()), empty_state(2, 10, 4), False)
    call = next(iter(calls(Layer(), [5])))
    feeds = {"input": call.inputs.input, "weight": call.inputs.weight, "new_tokens": torch.tensor(counts)}
    with refused():
        node(feeds, call.output.float())


def test_a_state_of_another_length_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="4 taps with 4 columns of state"):
        layer_model(Layer(), past=4)
