"""The pass that joins the rounding of keys and values to caches in 8 bits: the same numbers by one node, and what is another stays."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from still_graphs.ops import DOMAIN
from still_kernels.round_key_value.fuse import fuse_rounding
from tests.still_graphs.passes import applied, attach_functions
from tests.still_graphs.written import demand_unchanged

SHAPE: list[str | int] = ["b", "t", 3, 8]


def rounding(name: str, steps: str = "steps", divisor: str = "scale") -> list[onnx.NodeProto]:
    """What exports write for still_kernels.codes.rounded."""
    make = helper.make_node

    def at(part: str) -> str:
        return f"{name}.{part}"

    return [
        make("Cast", [name], [at("wide")], to=TensorProto.FLOAT),
        make("Abs", [at("wide")], [at("abs")]),
        make("ReduceMax", [at("abs"), "axes"], [at("largest")], keepdims=1),
        make("Clip", [at("largest"), "least"], [at("most")]),
        make("Shape", [at("most")], [at("shape")]),
        make("Expand", [steps, at("shape")], [at("steps")]),
        make("Div", [at("most"), at("steps")], [at("scale")]),
        make("Div", [at("wide"), at(divisor)], [at("shares")]),
        make("Round", [at("shares")], [at("codes")]),
        make("Mul", [at("codes"), at("scale")], [at("product")]),
        make("Cast", [at("product")], [at("rounded")], to=TensorProto.FLOAT16),
    ]


def model_of(value: str = "value", shape: list[str | int] = SHAPE, **change: str) -> onnx.ModelProto:
    """Keys, values and an attention that reads them rounded."""
    half = TensorProto.FLOAT16
    attention = helper.make_node(
        "Attention", ["query", "key.rounded", f"{value}.rounded", "counts", "lengths"], ["y"], domain=DOMAIN
    )
    nodes = [*rounding("key", **change), *rounding("value", **change), attention]
    names = ("query", "key", "value")
    info = {n: helper.make_tensor_value_info(n, half, shape) for n in (*names, "key.rounded", "value.rounded", "y")}
    given = [info[name] for name in names]
    given += [helper.make_tensor_value_info(name, TensorProto.INT64, ["b"]) for name in ("counts", "lengths")]
    weights = {"steps": np.float32(127), "others": np.float32(7), "least": np.float32(1e-30), "axes": np.array([-1])}
    graph = helper.make_graph(
        nodes,
        "g",
        given,
        [info["y"]],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
        value_info=[info["key.rounded"], info["value.rounded"]],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def run(model: onnx.ModelProto) -> list[np.ndarray]:
    """What the attention reads, which is left out."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    read = list(graph.node.pop().input)[1:3]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, SHAPE) for name in read]
    del graph.output[:], graph.value_info[:]
    graph.output.extend(outputs)
    attach_functions(copy)
    random = np.random.default_rng(0)
    rows = {name: random.standard_normal((2, 5, 3, 8)).astype(np.float16) for name in ("key", "value")}
    rows["key"][0, 0, 0] = 0
    feeds = {**rows, "query": rows["key"], "counts": np.ones(2, np.int64), "lengths": np.ones(2, np.int64)}
    session = onnxruntime.InferenceSession(copy.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(x) for x in session.run(None, feeds)]


def test_one_node_of_the_same_numbers() -> None:
    model = model_of()
    expected = run(model)
    assert applied(fuse_rounding, model) == 1
    node, attention = model.graph.node
    assert node.op_type == "RoundKeyValue" and list(node.input) == ["key", "value"]
    assert list(node.output) == list(attention.input)[1:3] == ["key.rounded", "value.rounded"]
    for found, before in zip(run(model), expected, strict=True):
        np.testing.assert_array_equal(found, before)
    assert applied(fuse_rounding, model) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"steps": "others"},
        {"divisor": "most"},
        {"value": "key"},
        {"shape": ["b", "t", 24]},
        {"shape": ["b", "t", 3, "d"]},
    ],
    ids=str,
)
def test_what_is_another_stays(change: dict[str, Any]) -> None:
    demand_unchanged(fuse_rounding, model_of(**change))
