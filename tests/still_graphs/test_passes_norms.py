"""The pass that joins the sum of a product with its norm: the same numbers by one node, and what is no such sum stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from still_graphs.ops import DOMAIN
from still_kernels.add_rms_norm.fuse import fuse_norms
from still_kernels.dense_matmul.fuse import sum_in_float32
from tests.still_graphs.protos import attribute
from tests.still_graphs.steps import applied, attach_functions

WIDTH, EPSILON = 24, 3e-2


def model_of(
    dtype: str = "float16",
    terms: tuple[str, str] = ("x", "product"),
    scale: str = "weight",
    axis: int = -1,
    read: str = "total",
) -> onnx.ModelProto:
    """A product, a sum and its norm; `read` is read on."""
    make, kind = helper.make_node, helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    random = np.random.default_rng(0)
    nodes = [
        make("MatMul", ["x", "matrix"], ["product"]),
        make("Add", list(terms), ["total"]),
        make("RMSNormalization", ["total", scale], ["normed"], axis=axis, epsilon=EPSILON),
        make("Add", [read, "normed"], ["y"]),
    ]
    given = {
        "matrix": random.standard_normal((WIDTH, WIDTH)) / 9,
        "weight": random.standard_normal(WIDTH) + 1,
        "bias": random.standard_normal(WIDTH),
    }

    def info(name: str) -> onnx.ValueInfoProto:
        shape: list[str | int] = [WIDTH] if name == "scale" else ["b", "t", WIDTH]
        return helper.make_tensor_value_info(name, kind, shape)

    graph = helper.make_graph(
        nodes,
        "g",
        [info("x"), info("scale")],
        [info("y")],
        [numpy_helper.from_array(value.astype(dtype), name) for name, value in given.items()],
        value_info=[info(name) for name in ("product", "total", "normed")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def run(model: onnx.ModelProto) -> np.ndarray:
    """The output for five tokens of two rows, small enough that the epsilon counts."""
    random = np.random.default_rng(1)
    given = {"x": (0.1 * random.standard_normal((2, 5, WIDTH))).astype(np.float16), "scale": np.ones(WIDTH, np.float16)}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, given)[0]).astype(np.float64)


def kinds(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize("terms", [("x", "product"), ("product", "x")])
def test_one_node_of_the_same_numbers(terms: tuple[str, str]) -> None:
    model = model_of(terms=terms)
    expected = run(model)
    applied(sum_in_float32, model)
    assert applied(fuse_norms, model) == 1
    assert kinds(model) == ["DenseMatMul", "AddRmsNorm", "Add"]
    node = model.graph.node[1]
    assert node.domain == DOMAIN and list(node.input) == [*terms, "weight"] and list(node.output) == ["total", "normed"]
    assert attribute(node, "norm_epsilon") == pytest.approx(EPSILON)
    attach_functions(model)
    np.testing.assert_allclose(run(model), expected, rtol=2e-3, atol=2e-3)
    assert applied(fuse_norms, model) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float32"},
        {"terms": ("x", "x")},
        {"terms": ("bias", "product")},
        {"scale": "scale"},
        {"axis": 1},
        {"read": "x"},
    ],
    ids=str,
)
def test_other_sums_and_norms_stay(change: dict[str, Any]) -> None:
    model = model_of(**change)
    applied(sum_in_float32, model)
    before = kinds(model)
    assert applied(fuse_norms, model) == 0 and kinds(model) == before
