"""Passes that let products sum in float32, and join them with what is around them: the same results by fewer nodes."""

import itertools

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from still_graphs.ops import DOMAIN
from still_kernels.dense_matmul.fuse import fuse_linear_layers, sum_in_float32
from still_kernels.gated_mlp.fuse import fuse_feed_forward
from tests.still_graphs import written
from tests.still_graphs.passes import applied, attach_functions
from tests.still_graphs.written import kinds, outputs_of

WIDTH, MIDDLE, EPSILON = 24, 40, 3e-4
RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "norm": RANDOM.standard_normal(WIDTH) + 1,
    "gate_up": RANDOM.standard_normal((WIDTH, 2 * MIDDLE)) / 5,
    "down": RANDOM.standard_normal((MIDDLE, WIDTH)) / 6,
    "head": RANDOM.standard_normal((17, WIDTH)),
    "sizes": np.array([MIDDLE, MIDDLE]),
}
SHAPES: dict[str, list[str | int]] = {
    **{name: ["b", "t", WIDTH] for name in ("x", "normed", "fed", "y")},
    **{name: ["b", "t", MIDDLE] for name in ("gate", "up", "bent", "silu", "middle")},
    "both": ["b", "t", 2 * MIDDLE],
    "z": ["b", "t", 17],
}


def layer(norm: str = "x", total: str = "x", halves: tuple[str, str] = ("gate", "up")) -> list[onnx.NodeProto]:
    """A feed-forward layer and a head as exports write them."""
    make = helper.make_node
    return [
        make("RMSNormalization", [norm, "norm"], ["normed"], axis=-1, epsilon=EPSILON),
        make("MatMul", ["normed", "gate_up"], ["both"]),
        make("Split", ["both", "sizes"], list(halves), axis=-1),
        make("Sigmoid", ["gate"], ["bent"]),
        make("Mul", ["gate", "bent"], ["silu"]),
        make("Mul", ["silu", "up"], ["middle"]),
        make("MatMul", ["middle", "down"], ["fed"]),
        make("Add", [total, "fed"], ["y"]),
        make("Transpose", ["head"], ["turned"], perm=[1, 0]),
        make("MatMul", ["y", "turned"], ["z"]),
    ]


def fused(model: onnx.ModelProto) -> int:
    """Changes by the passes of both ops."""
    return int(applied(fuse_linear_layers, model) + applied(fuse_feed_forward, model))


def model_of(nodes: list[onnx.NodeProto], outputs: tuple[str, ...] = ("z",), dtype: str = "float16") -> onnx.ModelProto:
    return written.model_of(nodes, ["x"], outputs, SHAPES, WEIGHTS, dtype)


def run(model: onnx.ModelProto) -> np.ndarray:
    """The outputs side by side, for five tokens of two rows."""
    x = 0.02 * np.random.default_rng(1).standard_normal((2, 5, WIDTH))
    return np.concatenate([y.astype(np.float64) for y in outputs_of(model, {"x": x}).values()], axis=-1)


def test_a_layer_and_a_head_become_two_nodes_of_the_same_numbers() -> None:
    model = model_of(layer())
    expected = run(model)
    assert applied(sum_in_float32, model) == 3
    assert kinds(model).count("DenseMatMul") == 3 and "MatMul" not in kinds(model)
    assert fused(model) == 3, "a norm, a residual, a layer"
    assert kinds(model) == ["GatedMlp", "DenseMatMul"]
    first, head = model.graph.node
    assert list(first.input) == ["x", "norm", "down", "gate_up"] and first.domain == head.domain == DOMAIN
    assert first.attribute[0].f == pytest.approx(EPSILON) and list(head.input) == ["y", "", "head"]
    attach_functions(model)
    np.testing.assert_allclose(run(model), expected, rtol=4e-3, atol=4e-3)
    assert applied(sum_in_float32, model) == 0


@pytest.mark.parametrize(
    ("change", "outputs", "left"),
    [
        ({"halves": ("up", "gate")}, ("z",), ["DenseMatMul", "Split", "Sigmoid", "Mul", "Mul", "DenseMatMul", "DenseMatMul"]),
        ({}, ("z", "middle"), ["DenseMatMul", "Split", "Sigmoid", "Mul", "Mul", "DenseMatMul", "DenseMatMul"]),
        ({}, ("z", "bent"), ["DenseMatMul", "Split", "Sigmoid", "Mul", "Mul", "DenseMatMul", "DenseMatMul"]),
        ({}, ("z", "fed"), ["DenseMatMul", "Split", "Sigmoid", "Mul", "Mul", "DenseMatMul", "Add", "DenseMatMul"]),
        ({}, ("z", "normed"), ["RMSNormalization", "DenseMatMul", "Split", "Sigmoid", "Mul", "Mul", "DenseMatMul", "DenseMatMul"]),
        ({"total": "normed"}, ("z",), ["RMSNormalization", "DenseMatMul", "Split", "Sigmoid", "Mul", "Mul", "DenseMatMul", "DenseMatMul"]),
    ],
    ids=str,
)  # fmt: skip
def test_what_others_read_stays(change: dict[str, str], outputs: tuple[str, ...], left: list[str]) -> None:
    """A layer whose up gates, and values that something else uses: joined as far as numbers stay those of the graph."""
    model = model_of(layer(**change), outputs)  # type: ignore[arg-type]
    expected = run(model)
    applied(sum_in_float32, model)
    fused(model)
    assert kinds(model) == left
    attach_functions(model)
    np.testing.assert_allclose(run(model), expected, rtol=4e-3, atol=4e-3)


def test_a_product_of_a_product_reads_the_new_one() -> None:
    """LoRA apart from its weight: what reads the first product's old result would read nothing."""
    nodes = [helper.make_node("MatMul", ["x", "thin"], ["low"]), helper.make_node("MatMul", ["low", "wide"], ["z"])]
    half = TensorProto.FLOAT16
    weights = [
        numpy_helper.from_array(RANDOM.standard_normal(shape).astype(np.float16), name)
        for name, shape in (("thin", (WIDTH, 4)), ("wide", (4, MIDDLE)))
    ]
    sides = {"x": WIDTH, "z": MIDDLE, "low": 4}
    x, z, low = (helper.make_tensor_value_info(name, half, ["b", "t", size]) for name, size in sides.items())
    graph = helper.make_graph(nodes, "g", [x], [z], weights, value_info=[low])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    assert applied(sum_in_float32, model) == 2
    assert kinds(model) == ["DenseMatMul"] * 2 and list(model.graph.node[1].input) == ["low", "wide"]


@pytest.mark.parametrize("swapped", list(itertools.product((False, True), repeat=2)), ids=str)
def test_a_product_keeps_its_only_residual(swapped: tuple[bool, bool]) -> None:
    """A LoRA pair apart from its base's product, and a residual behind: the second sum has no place in a node that has one."""
    make, half = helper.make_node, TensorProto.FLOAT16
    first, second = (["base", "pair"], ["x", "low_sum"])
    nodes = [
        make("Mul", ["x", "scale"], ["base"]),
        make("MatMul", ["x", "thin"], ["low"]),
        make("MatMul", ["low", "wide"], ["pair"]),
        make("Add", first[::-1] if swapped[0] else first, ["low_sum"]),
        make("Add", second[::-1] if swapped[1] else second, ["y"]),
    ]
    shapes = {"thin": (WIDTH, 4), "wide": (4, WIDTH), "scale": (WIDTH,)}
    weights = [
        numpy_helper.from_array((RANDOM.standard_normal(shape) + 2).astype(np.float16), n)
        for n, shape in shapes.items()
    ]
    sides = {"x": WIDTH, "y": WIDTH, "low": 4, "base": WIDTH, "pair": WIDTH, "low_sum": WIDTH}
    infos = {name: helper.make_tensor_value_info(name, half, ["b", "t", size]) for name, size in sides.items()}
    known = [infos[name] for name in ("low", "base", "pair", "low_sum")]
    graph = helper.make_graph(nodes, "g", [infos["x"]], [infos["y"]], weights, value_info=known)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    expected = run(model)
    applied(sum_in_float32, model)
    assert fused(model) == 1 and kinds(model).count("Add") == 1
    attach_functions(model)
    np.testing.assert_allclose(run(model), expected, rtol=4e-3, atol=4e-3)


def test_other_types_are_left_to_the_runtime() -> None:
    model = model_of(layer(), dtype="float32")
    before = kinds(model)
    assert applied(sum_in_float32, model) == 0 == fused(model) and kinds(model) == before


def test_results_have_types() -> None:
    model = model_of(layer())
    del model.graph.value_info[:]
    model.graph.value_info.append(helper.make_tensor_value_info("normed", TensorProto.FLOAT16, ["b", "t", WIDTH]))
    assert applied(sum_in_float32, model) == 1, "no more is known to be float16"
    assert model.graph.value_info[-1].name == "both"
