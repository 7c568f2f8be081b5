"""Write a graph's weights to a file next to it, one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from still_export.package.files import inside
from still_graphs.edits import forget

if TYPE_CHECKING:
    import onnx

INSIDE_BYTES = 256
"""Smaller tensors stay in the graph."""

ALIGNED_BYTES = 1 << 20
PAGE_BYTES = 4096
"""Tensors of at least ALIGNED_BYTES start at a page: older ONNX Runtimes copy others instead of mapping them."""

VIEW = "still.view_of"
"""Metadata of a weight that shares another's bytes in another shape or type: the name of that weight, which comes first."""

TURNED_BYTES = 1 << 27
"""Bytes of a transposed matrix that are laid out at a time, so that an 8B model's head (1 GB) is not in memory twice."""

Bytes = Callable[[int, int], None]
"""Called with bytes written, and bytes in all."""


def load_graph(path: Path) -> ir.Model:
    """A graph of a package with lazy weights. Files may be links into Hugging Face's cache, or have several names, which onnx_ir refuses.

    Raises:
        CheckError: A weight lies outside of the package.
    """
    model = ir.load(path)
    locate_weights(model.graph, path.parent)
    return model


def locate_weights(graph: ir.Graph, folder: Path) -> None:
    """Let a graph's weights be read from the package in `folder`; raises CheckError like `load_graph`."""
    for value in graph.initializers.values():
        if isinstance(tensor := value.const_value, ir.ExternalTensor):
            value.const_value = _placed(tensor, str(inside(folder, str(tensor.location)).resolve()), "")


def place_weights(model: ir.Model, folder: Path, location: str) -> None:
    """Set the external references of a loaded graph to the file `location` in `folder`, at the same offsets."""
    for value in model.graph.initializers.values():
        if isinstance(tensor := value.const_value, ir.ExternalTensor):
            value.const_value = _placed(tensor, location, folder)


def _placed(tensor: ir.ExternalTensor, location: str, folder: Path | str) -> ir.ExternalTensor:
    assert isinstance(tensor.shape, ir.Shape)
    return ir.ExternalTensor(
        location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name or "",
        base_dir=folder,
    )


def resolve_weights(graph: onnx.ModelProto, path: Path) -> Path:
    """Resolve links in the weight file names of a graph in memory: ONNX Runtime does not follow links there.

    Args:
        graph: Of the file `path`, changed here.

    Returns:
        The folder that the names start from.

    Raises:
        CheckError: A weight lies outside of the package.
    """
    folder = path.resolve().parent
    for tensor in graph.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = os.path.relpath(inside(path.parent, entry.value).resolve(), folder)
    return folder


def stored_array(tensor: onnx.TensorProto, folder: Path) -> np.ndarray:
    """Numbers of a weight in a graph of `folder`, wherever its bytes are. The onnx package refuses links and files with several names.

    Raises:
        CheckError: The weight lies outside of the package.
    """
    from onnx import TensorProto, external_data_helper, numpy_helper

    if tensor.data_location == TensorProto.EXTERNAL:
        place = external_data_helper.ExternalDataInfo(tensor)
        with inside(folder, place.location).open("rb") as file:
            file.seek(place.offset or 0)
            raw = file.read(-1 if place.length is None else place.length)
        tensor = TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=raw)
    return np.asarray(numpy_helper.to_array(tensor))


def save_streaming(
    model: ir.Model,
    path: Path,
    location: str,
    progress: Bytes = lambda done, total: None,
    holes: set[str] | None = None,
) -> None:
    """Write `model` to `path` and its weights to `location` next to it, one weight at a time.

    Args:
        holes: Given, weights that are not read yet become holes of the file, and their names are added; so are those that it has already.

    Raises:
        CheckpointError: A weight turns out to be damaged when it is read.
        OSError: The disk is full.
    """
    weights = [
        v
        for v in model.graph.initializers.values()
        if v.const_value is not None and v.const_value.nbytes >= INSIDE_BYTES
    ]
    written: dict[str, ir.ExternalTensor] = {}
    views = _views(weights)
    weights = [value for value in weights if value not in {view for view, _ in views}]
    total = sum(v.const_value.nbytes for v in weights if v.const_value is not None)
    done = 0
    with (path.parent / location).open("wb") as file:
        for value in weights:
            tensor = value.const_value
            assert tensor is not None and isinstance(tensor.shape, ir.Shape) and value.name is not None
            if tensor.nbytes >= ALIGNED_BYTES:
                file.write(bytes(-file.tell() % PAGE_BYTES))
            offset = file.tell()
            if holes is not None and (isinstance(tensor, ir.LazyTensor) or value.name in holes):
                holes.add(value.name)
                file.seek(tensor.nbytes, os.SEEK_CUR)
                value.const_value = written[value.name] = ir.ExternalTensor(
                    location,
                    offset,
                    tensor.nbytes,
                    tensor.dtype,
                    shape=tensor.shape,
                    name=value.name,
                    base_dir=path.parent,
                )
                continue
            # Two numbers of 4 bits share a byte, which NumPy does not know.
            packed = tensor.dtype.bitwidth < 8
            for part in [tensor.tobytes()] if packed else _laid_out(tensor.numpy()):
                file.write(part)
                del part  # a view of the weight's source file
            length = file.tell() - offset
            assert length == tensor.nbytes, f"{value.name} has {length} bytes, its shape says {tensor.nbytes}"
            value.const_value = written[value.name] = ir.ExternalTensor(
                location, offset, length, tensor.dtype, shape=tensor.shape, name=value.name, base_dir=path.parent
            )
            forget(tensor)
            done += length
            progress(done, total)
        file.truncate()
    for value, name in views:
        if holes is not None and name in holes:
            holes.add(str(value.name))
        external = written[name]
        assert isinstance(value.shape, ir.Shape) and value.name is not None and value.const_value is not None
        value.const_value = ir.ExternalTensor(
            location,
            external.offset,
            external.length,
            value.const_value.dtype,
            shape=value.shape,
            name=value.name,
            base_dir=path.parent,
        )
    try:
        ir.save(model, path)
    except ir.serde.SerdeError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # a fault of a weight stored in the graph itself
            cause = cause.__cause__
        raise cause from error


def _views(weights: list[ir.Value]) -> list[tuple[ir.Value, str]]:
    """Weights that share another's bytes, with its name: they are marked so, or have the same place in a file."""
    views, places = [], dict[tuple[str, int | None, int | None], str]()
    for value in weights:
        tensor = value.const_value
        if VIEW in value.metadata_props:
            views.append((value, value.metadata_props.pop(VIEW)))
        elif isinstance(tensor, ir.ExternalTensor):
            first = places.setdefault((str(tensor.path), tensor.offset, tensor.length), str(value.name))
            if first != value.name:
                views.append((value, first))
    return views


def _laid_out(array: np.ndarray) -> Iterator[memoryview]:
    """The bytes of `array` in row order; a transposed matrix in parts."""
    words = {2: np.int16, 4: np.int32}.get(array.itemsize)
    if array.ndim != 2 or array.flags.c_contiguous or not array.flags.f_contiguous or words is None:
        yield np.ascontiguousarray(array).view(np.uint8).data
        return
    stored = array.T.view(words)
    import torch

    step = max(1, TURNED_BYTES // (len(stored) * array.itemsize))
    for start in range(0, len(array), step):
        # PyTorch transposes whole matrices 6 times as fast as NumPy, parts no faster.
        part = torch.from_numpy(np.ascontiguousarray(stored[:, start : start + step]))
        yield part.t().contiguous().numpy().view(np.uint8).data
