"""Epsilons and tables held to the model's: right packages pass, one that rounding would hide fails with its name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from still_export.graph.options import ExportOptions
from still_export.models.read.source import find_source
from still_export.package.folder import Package, open_package
from still_export.proof.held_constants import check_constants
from still_export.proof.layer_inputs import layer_inputs
from still_export.proof.verdict import Check
from tests.still_export.conftest import Exporter
from tests.still_export.proof.plants import planted


def held(package: Package) -> Check:
    options = replace(ExportOptions.from_manifest(package.manifest), dtype="float32")
    return check_constants(package.path, package.manifest, find_source(options))


def epsilon_times_ten(model: onnx.ModelProto) -> None:
    found = [a for n in model.graph.node for a in n.attribute if a.name == "epsilon"]
    found[len(found) // 2].f *= 10


def epsilon_left_out(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.op_type == "RMSNormalization")
    kept = [a for a in node.attribute if a.name != "epsilon"]
    del node.attribute[:]
    node.attribute.extend(kept)


def slower_turn(model: onnx.ModelProto) -> None:
    tensor = next(t for t in model.graph.initializer if t.name.endswith("inv_freq"))
    values = numpy_helper.to_array(tensor).copy()
    values[-1] *= np.float32(1.01)
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


FAULTS: dict[Callable[[onnx.ModelProto], None], str] = {
    epsilon_times_ten: "norm.weight",
    epsilon_left_out: "norm.weight",
    slower_turn: "inv_freq",
}


@pytest.mark.parametrize("final", ["trt", "trt8", "genai"])
def test_constants_of_other_targets_pass(final: str, export_tiny: Exporter) -> None:
    right = held(export_tiny("llama", "float32" if final == "genai" else "float16", {}, final))
    assert right.passed and int(right.name.partition(" ")[0]) > 10, right


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_every_fault_of_constants_is_seen(family: str, export_tiny: Exporter, tmp_path: Path) -> None:
    """Of norms, too, whose weight the graph adds one to."""
    package = export_tiny(family, "float16", options={"native": False})
    right = held(package)
    assert right.passed and int(right.name.partition(" ")[0]) > 10, right
    assert layer_inputs(package.model_path, package.manifest["model"]["layers"])
    for change, where in FAULTS.items():
        with planted(package, tmp_path / change.__name__) as folder:
            graph = onnx.load(folder / "model.onnx", load_external_data=False)
            change(graph)
            onnx.save(graph, folder / "model.onnx")
        check = held(open_package(folder))
        assert not check.passed and where in check.where and "the model's" in check.what, (change.__name__, check)
