"""Activations in float32."""

import numpy as np
import onnx
import pytest

from still_graphs.passes.widen_activations import (
    OF_STEPS,
    activations_are_typed,
    activations_are_wide,
    widen_activations,
)
from tests.still_graphs.passes import applied
from tests.still_graphs.written import outputs_of, parsed


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_activations_of_16_bits_are_computed_in_float32(dtype: str) -> None:
    nodes = "s = Softplus (x) e = Elu <alpha: float = 0.5> (s) y = Sigmoid (e)"
    model = parsed(f"act ({dtype}[7] x) => ({dtype}[7] y) <{dtype}[7] s, {dtype}[7] e> {{ {nodes} }}")
    assert "16 bits" in applied(activations_are_wide, model) and not applied(activations_are_typed, model)
    feeds = {"x": np.linspace(-9, 9, 7, dtype=np.float16)}
    expected = outputs_of(model, feeds) if dtype == "float16" else {}  # the CPU provider has no bfloat16
    assert applied(widen_activations, model) == 3 and applied(widen_activations, model) == 0
    assert not applied(activations_are_wide, model)
    onnx.checker.check_model(model, full_check=True)
    types = {v.name: v.type.tensor_type.elem_type for v in onnx.shape_inference.infer_shapes(model).graph.value_info}
    bent = [node for node in model.graph.node if node.op_type in OF_STEPS]
    assert [types[name] for node in bent for name in (node.input[0], node.output[0])] == [onnx.TensorProto.FLOAT] * 6
    for name in expected:
        np.testing.assert_allclose(outputs_of(model, feeds)[name], expected[name], rtol=1e-3)


def test_float32_stays() -> None:
    assert applied(widen_activations, parsed("act (float[7] x) => (float[7] y) { y = Sigmoid (x) }")) == 0


def test_an_unknown_type_is_told() -> None:
    model = parsed("act (float16[7] x) => (float16[7] y) { h = Neg (x) y = Sigmoid (h) }")
    assert "unknown type" in applied(activations_are_typed, model)
