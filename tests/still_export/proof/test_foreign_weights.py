"""Low-bit weights of other exporters are decoded as ONNX Runtime does, and given to the layers that they were made of."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from still_export.proof.foreign_weights import NotDecoded, take_weights

K, ROWS = 64, 12
RANDOM = np.random.default_rng(0)


def low_bit(path: Path, bits: int, block: int, zeros: bool, kind: str = "MatMulNBits") -> Path:
    """A graph with one low-bit weight [ROWS, K] of random codes."""
    blocks = K // block
    codes = RANDOM.integers(0, 256, (ROWS, blocks, block * bits // 8), np.uint8)
    scales = RANDOM.uniform(0.5, 1.5, (ROWS, blocks)).astype(np.float32)
    points = RANDOM.integers(0, 256, (ROWS, -(-blocks * bits // 8)), np.uint8)
    facts: dict[str, Any] = {"bits": bits, "block_size": block}
    if kind == "MatMulNBits":
        arrays, given, shape = {"codes": codes, "scales": scales}, ["x", "codes", "scales"], ["T", ROWS]
        facts |= {"N": ROWS, "K": K}
        if zeros:
            points &= 15 if bits == 4 and blocks % 2 else 255
    else:
        arrays, given, shape = {"codes": codes.reshape(ROWS, -1), "scales": scales}, ["codes", "x", "scales"], ["T", K]
        facts |= {"gather_axis": 0, "quantize_axis": 1}
    if zeros:
        arrays["points"], given = points, [*given, "points"]
    node = helper.make_node(kind, given, ["y"], domain="com.microsoft", **facts)
    x = helper.make_tensor_value_info("x", *((1, ["T", K]) if kind == "MatMulNBits" else (TensorProto.INT64, ["T"])))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(
        helper.make_model(helper.make_graph([node], "g", [x], [y], tensors), opset_imports=opsets, ir_version=10), path
    )
    return path


def answered(path: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("bits", "block"), [(4, 32), (4, 64), (8, 32)])
def test_products_are_decoded_as_onnx_runtime_does(bits: int, block: int, zeros: bool, tmp_path: Path) -> None:
    right = answered(path := low_bit(tmp_path / "g.onnx", bits, block, zeros), np.eye(K, dtype=np.float32)).T
    model = torch.nn.Sequential(torch.nn.Linear(K, 5), torch.nn.Linear(K, 7), torch.nn.Embedding(ROWS, K))
    noise = RANDOM.normal(0, 0.1, right.shape)
    for layer, part in ((model[0], slice(7, None)), (model[1], slice(7))):  # side by side in one node
        layer.weight.data = torch.from_numpy(right[part] + noise[part]).float()
    assert take_weights(model, {path}) == 2
    np.testing.assert_allclose(np.concatenate([model[1].weight.detach(), model[0].weight.detach()]), right, atol=1e-4)
    model[0].weight.data = torch.randn(5, K)
    with pytest.raises(NotDecoded, match="no weight of the model"):
        take_weights(model, {path})


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_decoded_as_onnx_runtime_does(bits: int, zeros: bool, tmp_path: Path) -> None:
    path = low_bit(tmp_path / "g.onnx", bits, 32, zeros, "GatherBlockQuantized")
    right = answered(path, np.arange(ROWS))
    model = torch.nn.Sequential(torch.nn.Embedding(ROWS, K), torch.nn.Linear(K, ROWS))
    model[0].weight.data = model[1].weight.data = torch.from_numpy(right * 1.01)
    assert take_weights(model, {path}) == 1
    np.testing.assert_allclose(model[0].weight.detach(), right, atol=1e-4)
    assert not torch.equal(model[0].weight, model[1].weight), "the head keeps its own"
