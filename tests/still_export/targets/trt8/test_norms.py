"""Norms of the first channels alone, written over all channels."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from still_export.graph.options import ExportOptions
from still_export.targets.registry import target_of
from still_export.targets.trt8.norms import norm_in_place
from tests.still_export.linear_models import linear_model
from tests.still_export.packages import portable_package
from tests.still_graphs.written import outputs_of


def part_norm(kind: int, *, behind: str = "b") -> onnx.ModelProto:
    """The first six of ten channels normalized, and `behind` set beside them: the rest, or the rest turned."""
    info, numbers = helper.make_tensor_value_info, np.random.default_rng(0)
    sizes = {"x": 10, "a": 6, "b": 4, "normed": 6, "y": 10}
    values = {name: info(name, kind, ["rows", "tokens", size]) for name, size in sizes.items()}
    nodes = [
        helper.make_node("Split", ["x", "sizes"], ["a", "b"], axis=-1),
        helper.make_node("RMSNormalization", ["a", "scale"], ["normed"], name="norm", epsilon=1e-2),
        *([helper.make_node("Neg", ["b"], ["turned"])] if behind == "turned" else []),
        helper.make_node("Concat", ["normed", behind], ["y"], axis=-1, name="join"),
    ]
    scale = numbers.normal(size=6).astype(helper.tensor_dtype_to_np_dtype(kind))
    stored = [onnx.numpy_helper.from_array(scale, "scale"), onnx.numpy_helper.from_array(np.array([6, 4]), "sizes")]
    shapes = [values[name] for name in ("a", "b", "normed")]
    graph = helper.make_graph(nodes, "g", [values["x"]], [values["y"]], stored, value_info=shapes)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


@pytest.mark.parametrize("kind", [onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16])
def test_the_numbers_are_those_of_the_norm_of_the_part(kind: int) -> None:
    plain = part_norm(kind)
    rewritten = ir.from_proto(plain)
    assert norm_in_place(rewritten) == 1 and norm_in_place(rewritten) == 0
    found = ir.to_proto(rewritten)
    onnx.checker.check_model(found, full_check=True)
    assert not {n.op_type for n in found.graph.node} & {"Split", "Concat", "RMSNormalization"}
    x = np.random.default_rng(1).normal(size=(2, 3, 10)).astype(helper.tensor_dtype_to_np_dtype(kind)) * 3
    expected, got = (outputs_of(m, {"x": x})["y"].astype(np.float64) for m in (plain, found))
    assert np.array_equal(got[..., 6:], x[..., 6:].astype(np.float64)), "the rest passes bit for bit"
    assert np.abs(got - expected).max() <= (2e-6 if kind == onnx.TensorProto.FLOAT else 2e-3) * np.abs(expected).max()


@pytest.mark.parametrize("behind", ["normed", "turned"])
def test_other_neighbours_stay(behind: str) -> None:
    assert norm_in_place(ir.from_proto(part_norm(onnx.TensorProto.FLOAT, behind=behind))) == 0


@pytest.mark.slow
def test_latents_are_normalized_in_place_for_tensorrt_8(tmp_path: Path) -> None:
    linear_model("kimi_linear").save_pretrained(tmp_path / "model")
    package = portable_package(ExportOptions(str(tmp_path / "model")), tmp_path / "package", "trt8")
    graph = ir.load(package.path / "portable.onnx")
    assert norm_in_place in [step.run for step in target_of("trt8").passes] and norm_in_place(graph) > 0
    assert any(name.endswith("kv_a_layernorm.weight+ones") for name in graph.graph.initializers)
