"""Packages of the small graph, made without a model, for TensorRT, TensorRT-RTX and ONNX Runtime; any package with kernels for CPUs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from still_export.graph.options import ExportOptions
from still_export.package.files import MODEL, PORTABLE
from still_export.package.folder import Package, open_package, write_manifest
from still_export.package.installed import BUILD, MODULE
from still_export.package.programs import write_programs
from still_export.package.refusals import RunError
from still_export.package.trust import trust_package
from still_export.runtime.ort import OrtModel
from still_export.targets.lower import lower_into
from still_export.targets.ort.library import LIBRARY, describe_build
from still_export.targets.portable.package import write_portable
from still_export.targets.registry import target_of
from still_export.targets.trt.options import RtxOptions, TrtOptions
from still_graphs.states import State
from tests.still_export import fake_tensorrt
from tests.still_graphs.small_graph import SALIENT, SIZES, growth_of, small_graph, state_shape, state_type, states

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None, reason="needs tensorrt-rtx-cu13-libs and -bindings"
)


def lower_package(source: Package, options: Any, folder: Path, to: str = "") -> Package:
    """Make the package of a target in the existing, empty `folder`; its name is `to`, or as `options` have it."""
    lower_into(source.path, folder, target_of(to or options.target, options), options)
    return open_package(folder, check_hashes=False)


def onnx_package(folder: Path, dtype: str = "float16") -> Package:
    """An ONNX package of the small graph, without a tokenizer."""
    folder.mkdir(parents=True)
    for name in (MODEL, PORTABLE):
        onnx.save(small_graph(dtype), folder / name)
    (folder / "run_ort.py").write_text("")
    types_ = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.FLOAT16: "float16"}
    manifest = {
        "target": "onnx",
        "ops": {"HybridAttention": 1},
        "command": "still-export model --to onnx -o package",
        "config": {"model": "model"},
        "model": {
            "family": "llama",
            "dtype": dtype,
            "parameters": 1000,
            "layers": 1,
            "hidden_size": 20,
            "heads": SIZES["H"],
            "kv_heads": SIZES["HK"],
            "head_dim": SIZES["D"],
            "vocab_size": 23,
            "layer_types": ["hybrid_attention"],
            "linearized": True,
            "all_logits": True,
        },
        "eos_token_ids": [],
        "still": {"chunk_size": SIZES["C"], "salient_per_chunk": SALIENT, "select_scope": "q_head"},
        "capacity": {"capacity_tokens": 12 * SIZES["C"], "bounded": True},
        "prefill_tokens": 16,
        "states": [
            State(
                f"{name}.0",
                0,
                "HybridAttention",
                tuple(state_shape(name)),
                types_[state_type(name, dtype)],
                False,
                growth_of(name),
            ).to_dict()
            for name in states()
        ],
    }
    write_manifest(folder, manifest)
    return open_package(folder)


def portable_package(options: ExportOptions, folder: Path, to: str) -> Package:
    """What targets like `to` are lowered from, with the portable graph where runners look for theirs."""
    folder.mkdir()
    target = target_of(to)
    package = write_portable(options, folder, target.layout_for, target.to)
    shutil.copyfile(folder / PORTABLE, folder / MODEL)
    write_programs(folder, ["ort"])
    write_manifest(folder, package.manifest)
    return open_package(folder)


def rtx_package(folder: Path, **options: Any) -> Package:
    folder.mkdir(parents=True)
    trt = RtxOptions(**{"prefill_tokens": 32, "batch": 2, "archs": ("sm_89",)} | options)
    return lower_package(onnx_package(folder / "portable"), trt, folder)


def trt_package(folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str = "float16", **options: Any) -> Package:
    """A lowered package for TensorRT whose kernels were not compiled."""
    monkeypatch.setattr(
        "still_export.targets.trt.package._write_plugins",
        lambda graph, target, trt, say: fake_tensorrt.write_libraries(target, trt.architectures),
    )
    folder.mkdir(parents=True)
    # Products stay apart, so that an engine has norms and products of every kind.
    target = target_of("trt8")
    target = replace(target, passes=tuple(s for s in target.passes if s.name != "merge_linear_layers"))
    portable = onnx_package(folder / "portable", dtype)
    lower_into(portable.path, folder, target, TrtOptions(**{"batch": 2} | options))
    package = open_package(folder, check_hashes=False)
    trust_package(folder)  # as an export does that compiles its plugins here
    return package


def with_library(package: Package, library: str, folder: Path) -> OrtModel:
    """A copy of `package` in `folder` with the kernels for CPUs of `library`, run; skips what this processor has no instructions for."""
    shutil.copytree(package.path, folder)
    shutil.copyfile(library, folder / LIBRARY)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["native"] = {"library": LIBRARY, "system": platform.system(), "machine": platform.machine()}
    write_manifest(folder, {k: v for k, v in manifest.items() if k != "files"})
    trust_package(folder)
    try:
        model = OrtModel(folder)
    except RunError as error:
        if "this processor cannot run it" in str(error):
            pytest.skip(str(error))
        raise
    assert model.native is not None
    return model


def install_kernels(site: Path, monkeypatch: pytest.MonkeyPatch, cpu: str, content: bytes = b"") -> Path:
    """Put a still-export-kernels for processors `cpu`, whose library has `content`, into the folder `site` and on the path."""
    path = site / MODULE / LIBRARY
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    (path.parent / "__init__.py").touch()  # without it one that is installed would come first
    (path.parent / BUILD).write_text(json.dumps(describe_build(path, cpu)))
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return path
