"""Weights in codes are unpacked once where memory holds them, and else in every call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from still_export.loading.runtimes import Opening, open_ort, watched_graph
from still_export.package.files import MODEL, PORTABLE
from still_export.runtime.ort_session import UNPACKED_MOST, keep_codes, keeps_codes, open_session
from tests.still_export.conftest import Exporter
from tests.still_export.graph.quantization.test_quantization import SIZES
from tests.still_export.tiny import MIXED

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
    if keeps_codes(manifest, graph):
        keep_codes(options)
    assert options.enable_cpu_mem_arena == unpacked
    session = open_session(tmp_path, manifest, options, graph=graph)
    kept = {x.data_type for x in onnx.load(tmp_path / "optimized.onnx").graph.initializer}
    assert kept == {TensorProto.FLOAT if unpacked else TensorProto.UINT8}
    x = np.ones((1, 40), np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], x @ CODES.astype(np.float32))


@pytest.mark.slow
def test_weights_are_unpacked_right_before_their_products(export_tiny: Exporter) -> None:
    """Of the portable graph in a proof: the same answers to the last bit, and no function is left whose nodes ONNX Runtime would order."""
    package = export_tiny("llama", options={"quantize": "int4"}, sizes=SIZES, layer_types=MIXED)
    said, ids = [], np.arange(2, 40)[None]
    for nodes in ("com.microsoft", "plugin"):
        manifest = {**package.manifest, "quantization": {**package.manifest["quantization"], "nodes": nodes}}
        asked = Opening(package.path, manifest, bodies=True, graph=PORTABLE)
        graph = onnx.load_model_from_string(watched_graph(asked)[0])
        known = weights_alone(graph)
        alone = [set(node.output) <= known for node in graph.graph.node]
        if nodes == "plugin":
            assert not graph.functions and any(alone) and alone == sorted(alone, reverse=True)
        else:
            assert graph.functions
        model = open_ort(asked)
        model.start()
        said.append([model.feed(ids), *model.state_arrays().values()])
    for right, found in zip(*said, strict=True):
        np.testing.assert_array_equal(right, found)


def weights_alone(model: onnx.ModelProto) -> set[str]:
    """Values that no input changes."""
    known = {x.name for x in model.graph.initializer}
    for node in model.graph.node:
        if known.issuperset(filter(None, node.input)) and not any(a.HasField("g") for a in node.attribute):
            known |= set(node.output)
    return known
