"""Weights that are turned as they are written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from still_export.errors import CheckpointError
from still_export.graph import weights_file
from still_export.graph.lower import lazy_tensor

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("part_bytes", (1, 1000, 1 << 27))
def test_a_transposed_matrix_is_written_in_parts_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, part_bytes: int
) -> None:
    monkeypatch.setattr(weights_file, "TURNED_BYTES", part_bytes)
    weights = {
        "head": torch.randn(37, 29).to(dtype),
        "column": torch.randn(200, 1).to(dtype),
        "scale": torch.randn(200).to(dtype),
    }
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 17}, name="weights")
    for name, weight in weights.items():
        tensor = lazy_tensor(name, weight, turned=weight.dim() == 2)
        graph.initializers[name] = ir.Value(name=name, shape=tensor.shape, const_value=tensor)
    weights_file.save_streaming(ir.Model(graph, ir_version=8), tmp_path / "model.onnx", "model.onnx.data")
    found = ir.load(tmp_path / "model.onnx").graph.initializers
    for name, weight in weights.items():
        value = found[name].const_value
        assert value is not None
        wanted = weight.t() if weight.dim() == 2 else weight
        assert list(value.shape) == list(wanted.shape)  # type: ignore[arg-type]
        assert value.tobytes() == wanted.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_transposed_matrix_is_not_laid_out_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_file, "TURNED_BYTES", 4096)
    matrix = np.arange(512 * 64, dtype=np.float32).reshape(512, 64).T
    parts = [part.nbytes for part in weights_file._laid_out(matrix)]
    assert max(parts) <= 4096 and sum(parts) == matrix.nbytes


def test_a_small_tensor_that_is_damaged_is_named(tmp_path: Path) -> None:
    """It is written with the graph, where what is raised names that alone."""

    def read() -> ir.TensorProtocol:
        raise CheckpointError("bias in a file holds NaN")

    tensor = ir.LazyTensor(read, ir.DataType.FLOAT, ir.Shape([3]), name="bias")
    value = ir.Value(name="bias", shape=tensor.shape, const_value=tensor)
    graph = ir.Graph([], [], nodes=[], initializers=[value], opset_imports={"": 17}, name="weights")
    with pytest.raises(CheckpointError, match="bias in a file holds NaN"):
        weights_file.save_streaming(ir.Model(graph, ir_version=8), tmp_path / "model.onnx", "model.onnx.data")
