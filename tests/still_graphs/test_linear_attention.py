"""The function body of still::LinearAttention against a loop in float64: outputs and states."""

from typing import Any

import onnx
import pytest
import torch
from onnx import inliner

from still_graphs.errors import UnsupportedError
from still_kernels.linear_attention.meaning import empty_state
from still_kernels.linear_attention.spec import DELTA, GATED, LINEAR_ATTENTION
from tests.still_graphs.node_model import StatefulNode, fused, node_model, refused
from tests.still_kernels.linear_attention.inputs import LAYERS, SPLITS, Layer, Split, calls, error


def layer_model(layer: Layer, dtype: torch.dtype = torch.float32, **changes: Any) -> onnx.ModelProto:
    """A model of one node of the layer."""
    sizes = dict(
        HQ=layer.groups,
        G=layer.shared,
        HK=layer.keys,
        D=layer.dim,
        H=layer.heads,
        V=layer.size,
        E=layer.decay,
        W=layer.beta,
    )
    absent = tuple(n for n, takers in (("decay", GATED), ("beta", DELTA)) if layer.rule not in takers)
    given = {"update_rule": layer.rule, "scale": layer.scale, "absent": absent, **changes}
    return node_model(LINEAR_ATTENTION, sizes, dtype, **given)


def check(
    layer: Layer,
    splits: list[Split],
    dtype: torch.dtype = torch.float32,
    in_place: bool = False,
    bound: float | None = None,
    model: onnx.ModelProto | None = None,
    **options: Any,
) -> None:
    """Output and state of every call."""
    state = empty_state(2, layer.heads, layer.dim, layer.size)
    node = StatefulNode(LINEAR_ATTENTION, model or layer_model(layer, dtype), state, in_place, **options)
    for number, call in enumerate(calls(layer, splits, dtype)):
        feeds = {t.name: x for t in LINEAR_ATTENTION.inputs if (x := getattr(call.inputs, t.name)) is not None}
        output, present = node(feeds, call.output.to(dtype))
        wrong = error(output, call.output), error(present, call.state)
        assert max(wrong) <= (bound or layer.bound), (number, wrong)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "apart"])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_body_equals_the_loop(layer: Layer, in_place: bool) -> None:
    check(layer, SPLITS, in_place=in_place)


@pytest.mark.parametrize("splits", [[2, 198], [1] * 12, [1, 2, 3] * 4, [64, 65, 63]], ids=lambda x: str(x[:3]))
def test_splits(splits: list[Split]) -> None:
    check(Layer(decay=10), splits)


@pytest.mark.parametrize("dtype, bound", [(torch.float16, 1e-3), (torch.bfloat16, 4e-3)], ids=str)
def test_low_precision(dtype: torch.dtype, bound: float) -> None:
    check(Layer(), [70, 1, [5, 3]], dtype, in_place=True, bound=bound)


def test_newer_opset() -> None:
    layer_model(Layer(), opset=24)


@pytest.mark.parametrize("counts", [[5, -1], [5, 6], [5, 2**31], [-(2**62), 0]], ids=str)
def test_counts_out_of_range_are_refused(counts: list[int]) -> None:
    node = StatefulNode(LINEAR_ATTENTION, layer_model(Layer()), empty_state(2, 6, 10, 7), False)
    call = next(iter(calls(Layer(), [5])))
    feeds = {t.name: getattr(call.inputs, t.name) for t in LINEAR_ATTENTION.inputs} | {
        "new_tokens": torch.tensor(counts)
    }
    with refused():
        node(feeds, call.output.float())


@pytest.mark.parametrize(
    "layer, message",
    [
        (Layer(decay=3), "3 the last dimension of decay; expected 1 or 10"),
        (Layer(beta=2), "2 heads of beta; expected 1 or 6"),
        (Layer(keys=4), "4 key heads do not divide the 6 heads of value"),
    ],
)
def test_what_has_no_body_is_named(layer: Layer, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        layer_model(layer)


def test_rules_without_their_gates_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="update_rule='gated_delta' needs decay"):
        layer_model(Layer(), absent=("decay",))
    with pytest.raises(UnsupportedError, match="update_rule='linear' takes no decay"):
        layer_model(Layer("linear"), absent=("beta",))
    with pytest.raises(UnsupportedError, match="update_rule='rwkv' is unknown"):
        layer_model(Layer(), update_rule="rwkv")


def test_the_only_recurrence_is_over_chunks() -> None:
    """A Scan whose body has the products of a chunk, and no Loop."""
    model = inliner.inline_local_functions(layer_model(Layer(decay=10)))
    (branches,) = (n for n in model.graph.node if n.op_type == "If")
    nodes = [n for a in branches.attribute for n in a.g.node]
    (scan,) = (n for n in nodes if n.op_type == "Scan")
    assert not [n for n in nodes if n.op_type in ("Loop", "If")]
    body = next(a.g for a in scan.attribute if a.name == "body")
    assert [n.op_type for n in body.node].count("MatMul") == 3


@fused
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "apart"])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_body_around_the_op_of_another_domain(layer: Layer, in_place: bool, domain: str, asked: dict[str, Any]) -> None:
    model = layer_model(layer, **asked)
    assert [n.domain for n in model.functions[0].node if n.op_type == "LinearAttention"] == [domain]
    check(layer, SPLITS, in_place=in_place, model=model)


@fused
@pytest.mark.parametrize("dtype, bound", [(torch.float16, 1e-3), (torch.bfloat16, 4e-3)], ids=str)
def test_half_precision_around_it(dtype: torch.dtype, bound: float, domain: str, asked: dict[str, Any]) -> None:
    model = layer_model(Layer(keys=2), dtype, **asked)
    check(Layer(keys=2), [70, 1, [5, 3]], dtype, in_place=True, bound=bound, model=model)
