"""Weights in codes are unpacked once where memory holds them, and else in every call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from still_export.package.files import MODEL
from still_export.runtime.ort_session import UNPACKED_MOST, keep_codes, open_session

CODES = np.random.default_rng(0).integers(0, 16, (40, 30), np.uint8)


def write(folder: Path) -> bytes:
    """A product with a weight that the graph unpacks."""
    nodes = [
        helper.make_node("Cast", ["codes"], ["weight"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "weight"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 40])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 30])],
        [numpy_helper.from_array(CODES, "codes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, folder / MODEL)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize(
    ("nodes", "parameters", "portable", "unpacked"),
    [
        ("plugin", UNPACKED_MOST, False, True),
        ("plugin", UNPACKED_MOST + 1, False, False),
        ("plugin", 1, True, False),
        ("com.microsoft", UNPACKED_MOST + 1, False, True),
    ],
)
def test_large_models_keep_their_codes(
    tmp_path: Path, nodes: str, parameters: int, portable: bool, unpacked: bool
) -> None:
    whole = write(tmp_path)
    manifest = {"files": {}, "quantization": {"nodes": nodes}, "model": {"parameters": parameters}}
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    graph = whole if portable else MODEL
    keep_codes(options, manifest, graph)
    assert options.enable_cpu_mem_arena == unpacked
    session = open_session(tmp_path, manifest, options, graph=graph)
    kept = {x.data_type for x in onnx.load(tmp_path / "optimized.onnx").graph.initializer}
    assert kept == {TensorProto.FLOAT if unpacked else TensorProto.UINT8}
    x = np.ones((1, 40), np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], x @ CODES.astype(np.float32))
