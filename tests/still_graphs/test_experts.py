"""Definitions and function bodies of still::Route and still::Experts; ONNX Runtime's MoE with and without its guard."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from still_export.runtime.ort_session import NEWEST_NODES, version_of
from still_graphs.errors import ShapeError, UnsupportedError
from still_kernels.experts.meaning import Inputs, naive_experts
from still_kernels.experts.spec import EXPERTS
from still_kernels.experts_nbits.meaning import naive_experts_nbits
from still_kernels.experts_nbits.spec import EXPERTS_NBITS
from still_kernels.route.meaning import naive_route
from still_kernels.route.spec import ROUTE
from tests.still_graphs.node_model import node_model, session
from tests.still_kernels.experts import inputs as experts_cases
from tests.still_kernels.experts.inputs import (
    CHANNELS,
    INNER,
    ROUTERS,
    as_dense,
    exact,
    experts_inputs,
    nbits_inputs,
    route_inputs,
)

E = experts_cases.EXPERTS
CALLS = [(1, 1), (2, 3), (1, 70)]
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3}


def feeds(inputs: Any) -> dict[str, np.ndarray]:
    return {name: x.numpy() for name, x in vars(inputs).items() if isinstance(x, torch.Tensor)}


def far(found: Any, expected: torch.Tensor) -> float:
    return float((torch.as_tensor(found).double() - expected.double()).norm() / expected.double().norm())


def experts_model(given: Inputs, dtype: torch.dtype, onnxruntime: bool, **sizes: int) -> onnx.ModelProto:
    own = {"I": CHANNELS, "E": E, "K": given.expert.shape[2], "M": INNER, "R": given.gate_up.shape[1], **sizes}
    return node_model(EXPERTS, own, dtype, onnxruntime=onnxruntime, activation=given.activation)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name: str, dtype: torch.dtype) -> None:
    """The same experts in the same order; near ties are none in these calls."""
    given = route_inputs(name, 1, 1, dtype)
    sizes = {"I": CHANNELS, "E": E, "k": given.k}
    model = node_model(ROUTE, sizes, dtype, () if given.bias is not None else ("bias",), **ROUTERS[name])
    runner = session(model)
    for batch, tokens in CALLS:
        given = route_inputs(name, batch, tokens, dtype)
        expected = naive_route(given)
        expert, weight = runner.run(None, feeds(given))
        assert np.array_equal(expert, expected[0].numpy())
        assert far(weight, expected[1]) < 1e-6
        assert (weight >= 0).all() and (tokens == 1 or len(np.unique(expert)) > given.k)


def test_of_equal_scores_the_first_expert_is_chosen() -> None:
    given = route_inputs("softmax", 1, 2)
    given = replace(given, router=torch.zeros_like(given.router))
    found = session(node_model(ROUTE, {"I": CHANNELS, "E": E, "k": 3}, torch.float32, ("bias",), k=3)).run(
        None, feeds(given)
    )
    assert naive_route(given)[0].tolist() == found[0].tolist() == [[[0, 1, 2]] * 2]


@pytest.mark.parametrize("onnxruntime", [False, True], ids=["portable", "own"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_experts(activation: str, dtype: torch.dtype, onnxruntime: bool) -> None:
    given = experts_inputs(1, 1, activation=activation, dtype=dtype)
    model = experts_model(given, dtype, onnxruntime)
    (function,) = model.functions
    fused = onnxruntime and dtype == torch.float32 and activation == "swiglu"
    assert ("MoE" in {node.op_type for node in function.node}) == fused
    assert sum(len(f.node) for f in model.functions) < 60  # no branch for each expert
    runner = session(model)
    for batch, tokens in CALLS:
        given = experts_inputs(batch, tokens, activation=activation, dtype=dtype)
        assert far(runner.run(None, feeds(given))[0], exact(given)) < LIMITS[dtype], (batch, tokens)
        assert far(naive_experts(given), exact(given)) < LIMITS[dtype]


def between(model: onnx.ModelProto) -> onnx.ModelProto:
    """The node's input comes from a node that nobody else reads, and a node reads its output."""
    (node,) = model.graph.node
    node.input[0], node.output[0] = "before", "after"
    one = helper.make_node("Constant", [], ["one"], value=helper.make_tensor("one", TensorProto.FLOAT, [], [1.0]))
    model.graph.node.insert(0, helper.make_node("Mul", ["input", "one"], ["before"]))
    model.graph.node.insert(0, one)
    model.graph.node.append(helper.make_node("Mul", ["after", "one"], ["output"]))
    return model


@pytest.mark.parametrize("guard", [True, False])
def test_the_guard_keeps_zeros_away(guard: bool) -> None:
    """ONNX Runtime's MoE writes over an input that it reads last; the body must give it a later reader."""
    given = experts_inputs(2, 3)
    model = between(experts_model(given, torch.float32, True))
    if not guard:
        (function,) = model.functions
        (where,) = [node for node in function.node if node.op_type == "Where"]
        for node in function.node:
            node.input[:] = [where.input[2] if name == where.output[0] else name for name in node.input]
        function.node.remove(where)
    found = session(model).run(None, feeds(given))[0]
    assert (far(found, exact(given)) < 2e-6) == guard
    assert guard or not found.any()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(k=13), r"k=13 of 12 experts"),
        (dict(k=0), r"k=0 of 12 experts"),
        (dict(groups=5), "groups must divide"),
        (dict(groups=4, top_groups=1, k=4), "k=4 of 12 experts, 3 of which are candidates"),
        (dict(score="tanh"), "score='tanh' is unknown; known: softmax, sigmoid"),
        (dict(bias=torch.zeros(11)), r"bias: expected \[12\], got \[11\]"),
    ],
)
def test_routers_that_do_not_go_together_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        naive_route(replace(route_inputs("softmax", 1, 2), **change))


def test_experts_that_do_not_go_together_are_refused() -> None:
    given = experts_inputs(1, 2)
    with pytest.raises(ShapeError, match="activation='gelu' is unknown; known: swiglu, relu2"):
        naive_experts(replace(given, activation="gelu"))
    with pytest.raises(ShapeError, match="expected 14 rows for each expert with relu2, got 28"):
        naive_experts(replace(given, activation="relu2"))
    with pytest.raises(UnsupportedError, match="swiglu between 27 rows and 14 channels has no body"):
        experts_model(given, torch.float32, False, R=27)
    with pytest.raises(UnsupportedError, match="13 of 12 experts in the best 1 of 1 groups have no body"):
        node_model(ROUTE, {"I": CHANNELS, "E": E, "k": 13}, torch.float32, ("bias",), k=13)


@pytest.mark.parametrize("onnxruntime", [False, True], ids=["portable", "own"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("bits, zero_points", [(4, True), (4, False), (8, False)])
def test_experts_of_few_bits(bits: int, zero_points: bool, dtype: torch.dtype, onnxruntime: bool) -> None:
    """ONNX Runtime's own op rounds what its matrices read to 8 bits."""
    given = nbits_inputs(1, 1, bits, zero_points, dtype)
    sizes = {"I": 48, "E": E, "K": 3, "R": 64}
    sizes |= {"IW": 48 * bits // 32, "IS": 3, "IZ": 1, "MW": bits, "MS": 2, "MZ": 1}
    absent = () if zero_points else ("gate_up_zero_points", "down_zero_points")
    model = node_model(EXPERTS_NBITS, sizes, dtype, absent, onnxruntime=onnxruntime, bits=bits, block_size=16)
    assert ("QMoE" in {node.op_type for node in model.functions[0].node}) == onnxruntime
    if onnxruntime and version_of(import_module("onnxruntime")) < NEWEST_NODES:
        pytest.skip("this ONNX Runtime's QMoE has no input for the router's weights")
    runner = session(model)
    for batch, tokens in CALLS:
        given = nbits_inputs(batch, tokens, bits, zero_points, dtype)
        dense = as_dense(given)
        assert far(naive_experts_nbits(given), exact(dense)) < LIMITS[dtype]
        error = far(runner.run(None, feeds(given))[0], exact(dense))
        assert error < (0.02 if onnxruntime else LIMITS[dtype]), (batch, tokens, error)


def test_blocks_that_do_not_go_together_are_refused() -> None:
    sizes = {"I": 48, "E": E, "K": 3, "R": 64, "IW": 7, "IS": 3, "IZ": 1, "MW": 4, "MS": 2, "MZ": 1}
    with pytest.raises(UnsupportedError, match="4 bits in blocks of 16, 7 and 4 words, 3 and 2 scales for 48 and 32"):
        node_model(EXPERTS_NBITS, sizes, torch.float32, block_size=16)
