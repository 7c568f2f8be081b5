"""Writing a graph's weights to the file beside it, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir

INSIDE_BYTES = 256
"""Tensors below this size stay in the graph."""

ALIGNED_BYTES = 1 << 20
PAGE_BYTES = 4096
"""Tensors of at least ALIGNED_BYTES start at a page: older ONNX Runtimes map no others into memory, and copy them."""

VIEW = "still.view_of"
"""Metadata of a weight that is another weight's bytes in another shape or type: the name of that one, which comes first."""

Bytes = Callable[[int, int], None]
"""Told the bytes that were written and those that will be."""


def save_streaming(model: ir.Model, path: Path, location: str, progress: Bytes = lambda done, total: None) -> None:
    """Write `model` to `path` and its weights to the file `location` beside it. Each weight is read, written and forgotten.

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
    views = [(value, value.metadata_props.pop(VIEW)) for value in weights if VIEW in value.metadata_props]
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
            # Two numbers of 4 bits share a byte, which NumPy does not know.
            packed = tensor.dtype.bitwidth < 8
            file.write(tensor.tobytes() if packed else np.ascontiguousarray(tensor.numpy()).view(np.uint8).data)
            length = file.tell() - offset
            assert length == tensor.nbytes, f"{value.name} has {length} bytes, its shape says {tensor.nbytes}"
            value.const_value = written[value.name] = ir.ExternalTensor(
                location, offset, length, tensor.dtype, shape=tensor.shape, name=value.name, base_dir=path.parent
            )
            done += length
            progress(done, total)
    for value, name in views:
        held = written[name]
        assert isinstance(value.shape, ir.Shape) and value.name is not None and value.const_value is not None
        value.const_value = ir.ExternalTensor(
            location,
            held.offset,
            held.length,
            value.const_value.dtype,
            shape=value.shape,
            name=value.name,
            base_dir=path.parent,
        )
    ir.save(model, path)
