"""Sigmoids of two types."""

import numpy as np
import onnx

from still_export.targets.trt8.sigmoids import sigmoids_of_one_type, widen_sigmoids
from tests.still_graphs.passes import applied
from tests.still_graphs.written import outputs_of, parsed


def test_sigmoids_are_of_one_type() -> None:
    kinds = {"x": "float16[7]", "y": "float[7]"}

    def model(*given: str) -> onnx.ModelProto:
        inputs, gates, outputs = (", ".join(f"{kinds[x]} {x}{end}" for x in given) for end in ("", "_gate", "_out"))
        nodes = " ".join(f"{x}_gate = Sigmoid ({x}) {x}_out = Softplus ({x}_gate)" for x in given)
        return parsed(f"gates ({inputs}) => ({outputs}) <{gates}> {{ {nodes} }}", opset=17)

    both = model("x", "y")
    feeds = {"x": np.linspace(-9, 9, 7, dtype=np.float16), "y": np.linspace(-9, 9, 7, dtype=np.float32)}
    expected = outputs_of(model("x", "y"), feeds)
    assert "in 2 types" in applied(sigmoids_of_one_type, both)
    assert applied(widen_sigmoids, both) == 2 and applied(widen_sigmoids, both) == 0
    assert not applied(sigmoids_of_one_type, both)
    onnx.checker.check_model(both, full_check=True)
    for name, found in outputs_of(both, feeds).items():
        assert found.dtype == expected[name].dtype
        np.testing.assert_allclose(found, expected[name], rtol=1e-3)
    assert applied(widen_sigmoids, model("x")) == applied(widen_sigmoids, model("y")) == 0, "of one type they stay"
