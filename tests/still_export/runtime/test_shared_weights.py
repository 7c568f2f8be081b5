"""Weights that are the same bytes of a file are mapped once, and read as the graph says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from still_export.package.external import StoredTensor, stored_tensors
from still_export.package.files import MODEL
from still_export.package.refusals import CheckError
from still_export.runtime.ort_session import open_session
from still_export.runtime.sampling import RunError

ROWS, BYTES, OFFSET = 64, 128, 4096
DATA = "model.onnx.data"


def stored(
    name: str, kind: int, shape: tuple[int, ...], offset: int = OFFSET, length: int = ROWS * BYTES
) -> TensorProto:
    """An initializer in the file."""
    tensor = TensorProto(name=name, data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": DATA, "offset": str(offset), "length": str(length)}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def write(folder: Path, second: TensorProto, offset: int = OFFSET) -> onnx.ModelProto:
    """A graph of the row of bytes that is asked for, and of all words; its weights."""
    bytes_ = np.random.default_rng(0).integers(0, 256, OFFSET + 2 * ROWS * BYTES, np.uint8)
    (folder / DATA).write_bytes(bytes_.tobytes())
    nodes = [
        helper.make_node("Gather", ["rows", "index"], ["row"]),
        helper.make_node("ReduceMax", ["words"], ["most"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "two",
        [helper.make_tensor_value_info("index", TensorProto.INT64, [])],
        [
            helper.make_tensor_value_info("row", TensorProto.UINT8, [BYTES]),
            helper.make_tensor_value_info("most", TensorProto.INT32, []),
        ],
        [stored("rows", TensorProto.UINT8, (ROWS, BYTES), offset), second],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, folder / MODEL)
    return model


def mapped(folder: Path) -> list[tuple[int, int]]:
    """Begin and end in the file of what this process has mapped of it."""
    lines = (
        line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(f"{folder}/{DATA}")
    )
    spans = [(int(offset, 16), *(int(x, 16) for x in place.split("-"))) for place, _, offset, *_ in lines]
    return [(offset, offset + end - begin) for offset, begin, end in spans]


def options() -> onnxruntime.SessionOptions:
    made = onnxruntime.SessionOptions()
    made.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return made


@pytest.mark.parametrize("as_bytes", [False, True])
def test_same_bytes_are_mapped_once(tmp_path: Path, as_bytes: bool) -> None:
    model = write(tmp_path, stored("words", TensorProto.INT32, (ROWS, BYTES // 4)))
    graph = model.SerializeToString() if as_bytes else MODEL
    session = open_session(tmp_path, {"files": {DATA: ""}}, options(), graph=graph)
    assert len(mapped(tmp_path)) == 1
    kept = np.fromfile(tmp_path / DATA, np.uint8, ROWS * BYTES, offset=OFFSET)
    row, most = session.run(None, {"index": np.array(3)})
    assert np.array_equal(row, kept.reshape(ROWS, BYTES)[3]) and most == kept.view(np.int32).max()


@pytest.mark.parametrize(
    "second",
    [
        stored("words", TensorProto.INT32, (ROWS, BYTES // 4), OFFSET + ROWS * BYTES),
        stored("words", TensorProto.INT32, (ROWS, BYTES // 8), length=ROWS * BYTES // 2),
    ],
    ids=["elsewhere", "a part"],
)
def test_other_bytes_are_left_to_onnxruntime(tmp_path: Path, second: TensorProto) -> None:
    write(tmp_path, second)
    session = open_session(tmp_path, {"files": {DATA: ""}}, options())
    assert session.shared_weights == [] and len(mapped(tmp_path)) == 2
    kept = np.fromfile(tmp_path / DATA, np.uint8)
    begin, size = int(second.external_data[1].value), int(second.external_data[2].value)
    assert session.run(["most"], {"index": np.array(3)})[0] == kept[begin : begin + size].view(np.int32).max()


@pytest.mark.parametrize(
    "offset, columns",
    [(OFFSET, BYTES), (1 << 40, BYTES // 4), (-4096, BYTES // 4)],
    ids=["a shape of other size", "behind the file", "before it"],
)
def test_what_does_not_fit_is_onnxruntimes_to_refuse(tmp_path: Path, offset: int, columns: int) -> None:
    write(tmp_path, stored("words", TensorProto.INT32, (ROWS, columns), offset), offset)
    with pytest.raises(RunError, match="ONNX Runtime cannot load"):
        open_session(tmp_path, {"files": {DATA: ""}, "model": {"dtype": "float32"}}, options())


def test_stored_tensors_are_those_of_the_graph(tmp_path: Path) -> None:
    model = write(tmp_path, stored("words", TensorProto.INT32, (ROWS, BYTES // 4)))
    size = ROWS * BYTES
    expected = [
        StoredTensor("rows", TensorProto.UINT8, (ROWS, BYTES), DATA, OFFSET, size),
        StoredTensor("words", TensorProto.INT32, (ROWS, BYTES // 4), DATA, OFFSET, size),
    ]
    data = model.SerializeToString()
    assert stored_tensors(data, "it") == expected
    with pytest.raises(CheckError, match="it is no ONNX model"):
        stored_tensors(data[:-9], "it")
