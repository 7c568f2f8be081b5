"""What a manifest says of the model: right packages of all targets pass, a field that is another model's is named."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from still_export.errors import PackageError
from still_export.graph.options import ExportOptions
from still_export.models.read.source import find_source
from still_export.package.folder import Package
from still_export.proof.held_manifest import check_manifest
from tests.still_export.conftest import Exporter


def held(package: Package, manifest: dict[str, Any]) -> None:
    options = ExportOptions.from_manifest(package.manifest)
    dtype = str(next(iter(find_source(options).weights.values())).dtype).removeprefix("torch.")
    check_manifest(manifest, find_source(replace(options, dtype="float32")), dtype)


def salient(said: Any) -> Any:
    return next(state for state in said["states"] if state["growth"] and state["growth"]["lag"])


FAULTS: dict[str, Callable[[Any], None]] = {
    "still.chunk_size is 128": lambda said: said["still"].update(chunk_size=128),
    "still.salient_per_chunk": lambda said: said["still"].update(salient_per_chunk=7),
    "model.layers": lambda said: said["model"].update(layers=2),
    "model.layer_types": lambda said: said["model"].update(layer_types=["full_attention"] * 3),
    "model.parameters": lambda said: said["model"].update(parameters=7),
    "config.dtype is 'float16'": lambda said: said["config"].update(dtype="float16"),
    "model.dtype, of config.dtype": lambda said: said["model"].update(dtype="float16"),
    "dtype of the state": lambda said: said["states"][0].update(dtype="float16"),
    "config.all_logits": lambda said: said["config"].update(all_logits=not said["config"]["all_logits"]),
    "config.speculate": lambda said: said["config"].update(speculate=3),
    "config.quantize": lambda said: said["config"].update(quantize="int4"),
    "model.linearized": lambda said: said["model"].update(linearized=not said["model"]["linearized"]),
    "ops.HybridAttention is 77": lambda said: said["ops"].update(HybridAttention=77),
    "capacity.bounded": lambda said: said["capacity"].update(bounded=not said["capacity"]["bounded"]),
    "the names of states": lambda said: said["states"].pop(),
    "window_key.0x": lambda said: said["states"][0].update(name="window_key.0x"),
    "layer of the state": lambda said: said["states"][0].update(layer=1),
    "in_place of the state": lambda said: said["states"][0].update(in_place=not said["states"][0]["in_place"]),
    "growth of the state": lambda said: salient(said)["growth"].update(rows=99),
}


@pytest.mark.parametrize("final", ["", "trt", "trt8", "web", "genai"])
def test_manifests_of_all_targets_pass(final: str, export_tiny: Exporter) -> None:
    package = export_tiny("llama", "float16" if final in ("trt", "trt8") else "float32", {}, final)
    held(package, package.manifest)


def test_every_fault_of_a_manifest_is_named(export_tiny: Exporter) -> None:
    package = export_tiny()
    for where, change in FAULTS.items():
        said = copy.deepcopy(package.manifest)
        change(said)
        with pytest.raises(PackageError, match=where):
            held(package, said)
