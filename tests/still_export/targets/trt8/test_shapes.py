"""Reshapes of numbers that were made float32."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from still_export.targets.trt8.shapes import shape_before_widening, shaped_before_widening
from tests.still_graphs.steps import applied


def decay(move: str, *, kind: int = TensorProto.FLOAT16, read: bool = False) -> onnx.ModelProto:
    """softplus(-x) in float32, then as heads of four; `read`: another reads it as it was."""
    info, sizes = helper.make_tensor_value_info, ["rows", 8]
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Neg", ["wide"], ["minus"]),
        helper.make_node("Softplus", ["minus"], ["soft"]),
        helper.make_node(move, ["soft", "how"], ["y"], name="heads"),
        *([helper.make_node("Exp", ["soft"], ["z"])] if read else []),
    ]
    how = np.array([0, 2, 4] if move == "Reshape" else [-1])
    shape = ["rows", 2, 4] if move == "Reshape" else ["rows", 8, 1]
    ends = [info("y", TensorProto.FLOAT, shape), *([info("z", TensorProto.FLOAT, sizes)] if read else [])]
    values = [info(name, TensorProto.FLOAT, sizes) for name in ("wide", "minus", "soft")]
    stored = [onnx.numpy_helper.from_array(how, "how")]
    graph = helper.make_graph(nodes, "g", [info("x", kind, sizes)], ends, stored, value_info=values)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("move", ["Reshape", "Unsqueeze"])
def test_they_come_before_the_cast(move: str) -> None:
    plain, moved = decay(move), decay(move)
    assert "heads" in applied(shaped_before_widening, moved)
    assert applied(shape_before_widening, moved) == 1 and not applied(shaped_before_widening, moved)
    onnx.checker.check_model(moved, full_check=True)
    assert [n.op_type for n in moved.graph.node] == [move, "Cast", "Neg", "Softplus"]
    x = np.linspace(-9, 9, 24, dtype=np.float16).reshape(3, 8)
    expected, found = (ort.InferenceSession(m.SerializeToString()).run(None, {"x": x})[0] for m in (plain, moved))
    assert found.dtype == expected.dtype == np.float32 and np.array_equal(found, expected)


def test_others_stay() -> None:
    for model in (decay("Reshape", read=True), decay("Reshape", kind=TensorProto.FLOAT)):
        before = [n.op_type for n in model.graph.node]
        assert applied(shape_before_widening, model) == 0 and not applied(shaped_before_widening, model)
        assert [n.op_type for n in model.graph.node] == before
