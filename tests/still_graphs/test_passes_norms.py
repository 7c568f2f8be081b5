"""The pass that joins the sum of a product with its norm: the same numbers by one node, and what is no such sum stays."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from still_graphs.ops import DOMAIN
from still_kernels.add_rms_norm.fuse import fuse_norms
from still_kernels.dense_matmul.fuse import sum_in_float32
from tests.still_graphs import written
from tests.still_graphs.passes import applied, attach_functions
from tests.still_graphs.protos import attribute
from tests.still_graphs.written import demand_unchanged, kinds, outputs_of

WIDTH, EPSILON = 24, 3e-2


def model_of(
    dtype: str = "float16",
    terms: tuple[str, str] = ("x", "product"),
    scale: str = "weight",
    axis: int = -1,
    read: str = "total",
) -> onnx.ModelProto:
    """A product, a sum and its norm; `read` is read on."""
    make = helper.make_node
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

    shapes: dict[str, written.Shape] = dict.fromkeys(("x", "product", "total", "normed", "y"), ("b", "t", WIDTH))
    return written.model_of(nodes, ["x", "scale"], ["y"], shapes | {"scale": [WIDTH]}, given, dtype)


def run(model: onnx.ModelProto) -> np.ndarray:
    """The output for five tokens of two rows, small enough that the epsilon counts."""
    x = 0.1 * np.random.default_rng(1).standard_normal((2, 5, WIDTH))
    return outputs_of(model, {"x": x, "scale": np.ones(WIDTH)})["y"].astype(np.float64)


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
    demand_unchanged(fuse_norms, model)
