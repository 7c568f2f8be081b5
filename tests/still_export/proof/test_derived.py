"""What follows from the model is exported again: right packages of all targets are equal, and whatever is changed in one is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from still_export.errors import PackageError
from still_export.graph.options import ExportOptions
from still_export.package.files import MODEL, PORTABLE
from still_export.package.folder import open_package
from still_export.proof.derived import STRUCTURE, check_derived
from still_export.proof.node_reads import unread_initializers
from still_export.targets.lower import lower, lower_into
from still_export.targets.ort.options import OrtOptions
from still_export.targets.registry import target_of, targets_of
from still_export.targets.trt.options import TrtOptions
from tests.still_export import fake_tensorrt
from tests.still_export.conftest import Exporter
from tests.still_export.proof.plants import planted

SIZES = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
LAYERS = ["hybrid_attention", "full_attention", "hybrid_attention"]
Change = Callable[[Any], None]


def wrong_of(path: Path) -> list[str]:
    """Findings of a package that has its files' hashes."""
    package = open_package(path)
    verdict = check_derived(package, ExportOptions.from_manifest(package.manifest)).verdict
    assert verdict.checks or verdict.not_asked
    return ["; ".join([str(check), *check.notes]) for check in verdict.checks if not check.passed]


@pytest.mark.parametrize("to", ["trt", "web", "genai"])
def test_packages_of_all_targets_are_derived(
    to: str, export_tiny: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "still_export.targets.trt.package._write_plugins",
        lambda graph, target, trt, say: fake_tensorrt.write_libraries(target, trt.architectures),
    )
    package = export_tiny("llama", "float16" if to == "trt" else "float32")
    (tmp_path / "lowered").mkdir()
    options = TrtOptions() if to == "trt" else targets_of(to)[0].options()
    lower_into(package.path, tmp_path / "lowered", target_of(to, options), options)
    assert wrong_of(tmp_path / "lowered") == []


@pytest.mark.parametrize("options", [{"quantize": "int4"}, {"quantize": "int8", "all_logits": True}, {"speculate": 3}])
def test_every_kind_of_package_is_derived(options: dict[str, Any], export_tiny: Exporter) -> None:
    package = export_tiny("llama", "float32", options, sizes=SIZES, layer_types=LAYERS)
    assert wrong_of(package.path) == []


def test_a_narrowed_package_is_derived(export_tiny: Exporter, tmp_path: Path) -> None:
    lower(export_tiny().path, "onnx", tmp_path / "half", dtype="float16", options=OrtOptions(native=False))
    assert wrong_of(tmp_path / "half") == []


def _insert(graph: onnx.ModelProto) -> None:
    graph.graph.node.insert(0, helper.make_node("Shape", ["input_ids"], ["rows"], name="extra", end=1))


def _body(graph: onnx.ModelProto) -> None:
    node = next(n for f in graph.functions for n in f.node if n.op_type == "Add")
    node.op_type = "Sub"


def _constant(graph: onnx.ModelProto) -> None:
    tensor = next(t for t in graph.graph.initializer if t.raw_data and t.data_type == onnx.TensorProto.INT64)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + 1, tensor.name))


def _no_capacity(graph: onnx.ModelProto) -> None:
    next(entry for entry in graph.metadata_props if entry.key == "still.capacity").value = "{}"


GRAPHS: dict[str, tuple[str, Change]] = {
    "extra": (MODEL, _insert),
    "Sub": (PORTABLE, _body),
    "initializer": (MODEL, _constant),
    "opset_import": (MODEL, lambda graph: graph.opset_import.append(helper.make_opsetid("other", 1))),
    "metadata_props": (
        MODEL,
        _no_capacity,
    ),
}
FIELDS: dict[str, Change] = {
    "still.chunk_size": lambda said: said["still"].update(chunk_size=128),
    "model.hidden_size": lambda said: said["model"].update(hidden_size=77),
    "model.dtype": lambda said: said["model"].update(dtype="float16"),
    "states[0].dtype": lambda said: said["states"][0].update(dtype="float16"),
    "all_logits": lambda said: said["config"].update(all_logits=not said["config"]["all_logits"]),
    "state_identity": lambda said: said.update(state_identity="0" * 64),
    "portable": lambda said: said.update(portable="0" * 64),
    "prefill_tokens": lambda said: said.update(prefill_tokens=77),
    "ops.HybridAttention": lambda said: said["ops"].update(HybridAttention=77),
    "capacity.bounded": lambda said: said["capacity"].update(bounded=not said["capacity"]["bounded"]),
    "eos_token_ids": lambda said: said.update(eos_token_ids=[5]),
}


def test_every_change_of_graph_and_manifest_is_named(export_tiny: Exporter, tmp_path: Path) -> None:
    package = export_tiny()
    for number, (what, (name, change)) in enumerate(GRAPHS.items()):
        with planted(package, tmp_path / f"graph{number}") as folder:
            graph = onnx.load(folder / name, load_external_data=False)
            change(graph)
            onnx.save(graph, folder / name)
        found = wrong_of(folder)
        assert what in " ".join(found), (what, found)
    for number, (what, edit) in enumerate(FIELDS.items()):
        with planted(package, tmp_path / f"field{number}") as folder:
            said = json.loads((folder / "manifest.json").read_text())
            edit(said)
            (folder / "manifest.json").write_text(json.dumps(said))
        found = wrong_of(folder)
        assert found and (what in " ".join(found) or what == "all_logits"), (what, found)


def test_other_bytes_in_files_are_named(export_tiny: Exporter, tmp_path: Path) -> None:
    with planted(export_tiny(), tmp_path / "file") as folder:
        (folder / "generation_config.json").write_text("{}")
    assert "generation_config.json" in wrong_of(folder)[0]


def test_a_package_of_other_versions_that_differs_is_not_asked(export_tiny: Exporter, tmp_path: Path) -> None:
    with planted(export_tiny(), tmp_path / "old") as folder:
        (folder / "generation_config.json").write_text("{}")
    said = json.loads((folder / "manifest.json").read_text())
    said["versions"]["still-export"] = "0.0.1"
    (folder / "manifest.json").write_text(json.dumps(said))
    package = open_package(folder)
    verdict = check_derived(package, ExportOptions.from_manifest(package.manifest)).verdict
    assert verdict.passed and STRUCTURE in verdict.not_asked[0] and "0.0.1" in verdict.not_asked[0]
    said["model"]["hidden_size"] = 77  # any version describes the model alike
    (folder / "manifest.json").write_text(json.dumps(said))
    assert "model.hidden_size" in wrong_of(folder)[0]


@pytest.mark.parametrize("entry", ["numpy.py", "runtime/x.py", "runtime/__pycache__/x.pyc", "other/x.txt"])
def test_unlisted_entries_are_refused(entry: str, export_tiny: Exporter, tmp_path: Path) -> None:
    with planted(export_tiny(), tmp_path / "copy") as folder:
        pass
    (folder / entry).parent.mkdir(exist_ok=True)
    (folder / entry).write_text("")
    with pytest.raises(PackageError, match=Path(entry).parts[-2 if "__pycache__" in entry else 0]):
        open_package(folder, only_listed=True)
    open_package(folder)


@pytest.mark.parametrize("name", ["verify", "model.onnx", "bench"])
def test_links_are_refused(name: str, export_tiny: Exporter, tmp_path: Path) -> None:
    with planted(export_tiny(), tmp_path / "copy") as folder:
        pass
    (tmp_path / "elsewhere").mkdir()
    if (folder / name).exists():
        (folder / name).rename(tmp_path / "elsewhere" / name)
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PackageError, match="link"):
        open_package(folder, only_listed=True)


def test_initializers_are_read_by_nodes_and_not_by_names() -> None:
    weight = numpy_helper.from_array(np.ones(3, np.float32), "weight")
    nodes = [
        helper.make_node("f", ["x", "weight"], ["y"], domain="own"),
        helper.make_node("Neg", ["weight"], ["unused"]),
    ]
    kind = onnx.TensorProto.FLOAT
    info = [helper.make_tensor_value_info(name, kind, [3]) for name in ("x", "y")]
    for op, unread in (("Add", []), ("Identity", ["weight"])):
        inner = helper.make_node(op, ["a", "b"][: 2 if op == "Add" else 1], ["c"])
        function = helper.make_function("own", "f", ["a", "b"], ["c"], [inner], [helper.make_opsetid("", 17)])
        graph = helper.make_graph(nodes, "g", info[:1], info[1:], [weight])
        assert unread_initializers(helper.make_model(graph, functions=[function])) == unread
