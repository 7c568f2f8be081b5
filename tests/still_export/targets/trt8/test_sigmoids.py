"""Sigmoids of two types."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from still_export.targets.trt8.sigmoids import sigmoids_of_one_type, widen_sigmoids
from tests.still_graphs.steps import applied
from tests.still_graphs.test_passes_trt import session


def test_sigmoids_are_of_one_type() -> None:
    kinds = {"x": TensorProto.FLOAT16, "y": TensorProto.FLOAT}

    def model(*given: str) -> onnx.ModelProto:
        nodes = [helper.make_node("Sigmoid", [x], [f"{x}.gate"]) for x in given]
        nodes += [helper.make_node("Softplus", [f"{x}.gate"], [f"{x}.out"]) for x in given]
        values = {
            x: [helper.make_tensor_value_info(f"{x}{end}", kinds[x], [7]) for end in ("", ".gate", ".out")]
            for x in given
        }
        graph = helper.make_graph(
            nodes,
            "gates",
            [v[0] for v in values.values()],
            [v[2] for v in values.values()],
            value_info=[v[1] for v in values.values()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    both = model("x", "y")
    feeds = {"x": np.linspace(-9, 9, 7, dtype=np.float16), "y": np.linspace(-9, 9, 7, dtype=np.float32)}
    expected = session(model("x", "y")).run(None, feeds)  # type: ignore[attr-defined]
    assert "in 2 types" in applied(sigmoids_of_one_type, both)
    assert applied(widen_sigmoids, both) == 2 and applied(widen_sigmoids, both) == 0
    assert not applied(sigmoids_of_one_type, both)
    onnx.checker.check_model(both, full_check=True)
    for found, wanted in zip(session(both).run(None, feeds), expected, strict=True):  # type: ignore[attr-defined]
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=1e-3)
    assert applied(widen_sigmoids, model("x")) == applied(widen_sigmoids, model("y")) == 0, "of one type they stay"
