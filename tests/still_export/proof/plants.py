"""Copies of packages in which one thing is changed on purpose, with hashes that fit: what a proof must see."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx.external_data_helper import ExternalDataInfo

from still_export.package.folder import Package, open_package, write_manifest
from still_export.package.trust import trust_package

TYPES = {1: np.float32, 2: np.uint8, 3: np.int8, 6: np.int32, 7: np.int64, 10: np.float16, 16: ml_dtypes.bfloat16}

Weights = Mapping[str, np.ndarray]


@contextmanager
def planted(package: Package, folder: Path) -> Iterator[Path]:
    """A copy of `package` in `folder` to be changed; its manifest is written anew behind the block."""
    shutil.copytree(package.path, folder)
    yield folder
    manifest = json.loads((folder / "manifest.json").read_text())
    write_manifest(folder, {name: value for name, value in manifest.items() if name != "files"})
    if manifest.get("native"):
        trust_package(folder)


def searched_copy(package: Package, folder: Path) -> Package:
    """A copy that says gptq of its codes, which are to nearest: a search takes a library and text."""
    shutil.copytree(package.path, folder)
    said = {**package.manifest, "config": {**package.manifest["config"], "quantize_method": "gptq"}}
    (folder / "manifest.json").write_text(json.dumps(said))
    return open_package(folder)


def with_weights(package: Package, folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Package:
    """A copy whose weights, [by the graph's names] as they lie in its files, `change` edits in place."""
    with planted(package, folder):
        for name in ("model.onnx", "portable.onnx"):  # small weights lie in each graph itself
            graph = onnx.load(folder / name, load_external_data=False)
            held: dict[str, np.ndarray] = {}
            apart: list[tuple[onnx.TensorProto, np.ndarray]] = []
            for tensor in graph.graph.initializer:
                kind = TYPES.get(tensor.data_type)
                if kind is None:
                    continue
                if tensor.data_location == onnx.TensorProto.EXTERNAL:
                    if name == "portable.onnx":
                        continue  # changed already: the same bytes
                    place = ExternalDataInfo(tensor)
                    held[tensor.name] = np.memmap(
                        folder / place.location, kind, "r+", place.offset or 0, tuple(tensor.dims)
                    )
                elif tensor.raw_data:
                    values = np.frombuffer(tensor.raw_data, kind).reshape(tuple(tensor.dims)).copy()
                    apart.append((tensor, values))
                    held[tensor.name] = values
            try:
                change(held)
            except KeyError:  # what lies in files alone
                if name == "model.onnx":
                    raise
            for tensor, values in apart:
                tensor.raw_data = values.tobytes()
            onnx.save(graph, folder / name)
            del held
    return open_package(folder)


def exchange(first: np.ndarray, second: np.ndarray) -> None:
    """Exchange the values of two arrays, which may be parts of one."""
    kept = first.copy()
    first[...] = second
    second[...] = kept
