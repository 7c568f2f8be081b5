"""Reshapes of numbers that were made float32."""

import numpy as np
import onnx
import pytest

from still_export.targets.trt8.shapes import shape_before_widening, shaped_before_widening
from tests.still_graphs.passes import applied
from tests.still_graphs.written import outputs_of, parsed


def decay(move: str, *, kind: str = "float16", read: bool = False) -> onnx.ModelProto:
    """softplus(-x) in float32, then as heads of four; `read`: another reads it as it was."""
    how, shape = ("int64[3] how = {0, 2, 4}", "2,4") if move == "Reshape" else ("int64[1] how = {-1}", "8,1")
    also, more = (", float[rows,8] z", "z = Exp (soft)") if read else ("", "")
    return parsed(
        f"""
    g ({kind}[rows,8] x) => (float[rows,{shape}] y{also})
    <{how}, float[rows,8] wide, float[rows,8] minus, float[rows,8] soft> {{
        wide = Cast <to = 1> (x)
        minus = Neg (wide)
        soft = Softplus (minus)
        [heads] y = {move} (soft, how)
        {more}
    }}""",
        opset=17,
    )


@pytest.mark.parametrize("move", ["Reshape", "Unsqueeze"])
def test_they_come_before_the_cast(move: str) -> None:
    plain, moved = decay(move), decay(move)
    assert "heads" in applied(shaped_before_widening, moved)
    assert applied(shape_before_widening, moved) == 1 and not applied(shaped_before_widening, moved)
    onnx.checker.check_model(moved, full_check=True)
    assert [n.op_type for n in moved.graph.node] == [move, "Cast", "Neg", "Softplus"]
    x = np.linspace(-9, 9, 24, dtype=np.float16).reshape(3, 8)
    expected, found = (outputs_of(m, {"x": x})["y"] for m in (plain, moved))
    assert found.dtype == expected.dtype == np.float32 and np.array_equal(found, expected)


def test_others_stay() -> None:
    for model in (decay("Reshape", read=True), decay("Reshape", kind="float")):
        before = [n.op_type for n in model.graph.node]
        assert applied(shape_before_widening, model) == 0 and not applied(shaped_before_widening, model)
        assert [n.op_type for n in model.graph.node] == before
