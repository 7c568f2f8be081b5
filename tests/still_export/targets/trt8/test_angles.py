"""Angles without whole turns."""

import numpy as np
import onnx
from onnx import TensorProto, helper

from still_export.targets.trt8.angles import angles_reduced, reduce_angles
from tests.still_graphs.passes import applied
from tests.still_graphs.written import outputs_of, parsed

SIZE = 5


def model(dtype: str) -> onnx.ModelProto:
    """Sine and cosine of one angle, a sine of another."""
    of = f"{dtype}[n,{SIZE}]"
    nodes = "sin_a = Sin (a) cos_a = Cos (a) sin_b = Sin (b)"
    return parsed(f"waves ({of} a, {of} b) => ({of} sin_a, {of} cos_a, {of} sin_b) {{ {nodes} }}", opset=17)


def test_sines_read_half_a_turn_at_most() -> None:
    rng = np.random.default_rng(0)
    places = rng.integers(0, 131_072, [4096, SIZE]).astype(np.float32)
    feeds = {"a": places, "b": -places * np.float32(0.7306)}
    reduced = model("float")
    assert "whole turns" in applied(angles_reduced, reduced)
    assert applied(reduce_angles, reduced) == 3 and applied(reduce_angles, reduced) == 0
    assert not applied(angles_reduced, reduced)
    onnx.checker.check_model(reduced, full_check=True)
    assert sum(node.op_type == "Round" for node in reduced.graph.node) == 2, "once for each angle"
    angles = [node.input[0] for node in reduced.graph.node if node.op_type in ("Sin", "Cos")]
    shown = onnx.ModelProto.FromString(reduced.SerializeToString())
    shown.graph.output.extend(helper.make_tensor_value_info(x, TensorProto.FLOAT, None) for x in dict.fromkeys(angles))
    *waves, part_a, part_b = outputs_of(shown, feeds).values()
    for part in (part_a, part_b):
        assert np.abs(part).max() < np.pi + 0.02
    wide = [feeds[x].astype(np.float64) for x in "aab"]
    for wave, function, angle in zip(waves, (np.sin, np.cos, np.sin), wide, strict=True):
        np.testing.assert_allclose(wave, function(angle), atol=4e-7)


def test_halves_stay() -> None:
    assert applied(reduce_angles, model("float16")) == 0
