"""Low-bit weights of decoders from other exporters: decoded, and put into the reference, which then computes with the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from still_export.graph.weights_file import stored_array

PRODUCT, ROWS, CODES = "MatMulNBits", "GatherBlockQuantized", "DequantizeLinear"
ALIKE = 0.35
"""Most relative distance of decoded codes to the weight that they were made of: 2 bits lose a third, another weight differs by 1.4."""


class NotDecoded(Exception):
    """The file has low-bit weights that are not decoded here, or that are no weights of the model."""


def take_weights(model: Any, files: set[Path]) -> int:
    """Give the linear layers and embeddings of `model` the numbers that the decoder's codes stand for.

    Returns:
        The number of weights.

    Raises:
        NotDecoded: A node's codes are not decoded here, or none of the model's weights is like them.
    """
    linear = {id(m): m for m in model.modules() if isinstance(m, torch.nn.Linear)}
    tables = {id(m): m for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    seen, taken = set[str](), 0
    for kind, name, decoded in (found for file in sorted(files) for found in _decoded(file)):
        if name in seen:
            continue
        seen.add(name)
        start = 0
        while start < len(decoded):
            left = decoded[start:]
            module = next((m for m in (tables if kind == ROWS else linear).values() if _is_like(m.weight, left)), None)
            if module is None:
                raise NotDecoded(f"no weight of the model is like rows {start} and following of {name}")
            (tables if kind == ROWS else linear).pop(id(module))
            rows = len(module.weight)
            module.weight = torch.nn.Parameter(torch.from_numpy(left[:rows].copy()).to(module.weight.dtype), False)
            start, taken = start + rows, taken + 1
    return taken


def _is_like(weight: torch.Tensor, decoded: np.ndarray) -> bool:
    if weight.shape[1] != decoded.shape[1] or len(weight) > len(decoded):
        return False
    right = weight.detach().float().numpy()
    return bool(np.linalg.norm(decoded[: len(right)] - right) <= ALIKE * np.linalg.norm(right))


def _decoded(file: Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """Op, name and numbers [N, K] of every low-bit weight of a graph."""
    model = onnx.load(file, load_external_data=False)
    graphs = [model.graph]
    for graph in graphs:
        parts = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            graphs += [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
            facts = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            arrays = [stored_array(parts[n], file.parent) if n in parts else None for n in node.input]
            if node.op_type == PRODUCT:
                yield PRODUCT, node.input[1], _product(facts, arrays)
            elif node.op_type == ROWS:
                yield ROWS, node.input[0], _rows(facts, arrays, parts[node.input[0]].data_type)
            elif node.op_type in ("QMoE", CODES, "MatMulInteger", "DynamicQuantizeMatMul"):
                raise NotDecoded(f"{node.op_type} {node.name}")


def _nibbles(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes from bytes along the last axis, the lowest bits first."""
    if bits == 8:
        return packed
    if bits not in (2, 4):
        raise NotDecoded(f"codes of {bits} bits")
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).reshape(*packed.shape[:-1], -1)


def _product(facts: dict[str, Any], arrays: list[np.ndarray | None]) -> np.ndarray:
    """MatMulNBits: codes [N, blocks, bytes], scales [N, blocks], zero points packed by rows or as floats."""
    bits, (rows, inputs) = facts.get("bits", 4), (facts["N"], facts["K"])
    packed, scales = arrays[1], arrays[2]
    if packed is None or scales is None or (len(arrays) > 4 and arrays[4] is not None):
        raise NotDecoded("MatMulNBits with computed codes or with an order of inputs")
    codes = _nibbles(packed.reshape(rows, -1, packed.shape[-1]), bits).astype(np.float32)
    blocks = codes.shape[1]
    zeros = arrays[3] if len(arrays) > 3 else None
    if zeros is None:
        shift = np.full((rows, blocks), 2.0 ** (bits - 1), np.float32)
    elif zeros.dtype == np.uint8:
        shift = _nibbles(zeros.reshape(rows, -1), bits)[:, :blocks].astype(np.float32)
    else:
        shift = zeros.reshape(rows, blocks).astype(np.float32)
    values = (codes - shift[..., None]) * scales.reshape(rows, blocks, 1).astype(np.float32)
    return np.asarray(values.reshape(rows, -1)[:, :inputs])


def _rows(facts: dict[str, Any], arrays: list[np.ndarray | None], kind: int) -> np.ndarray:
    """GatherBlockQuantized: codes [V, K], in bytes packed by `bits`; scales [V, blocks]."""
    table, scales, zeros = arrays[0], arrays[2], arrays[3] if len(arrays) > 3 else None
    if table is None or scales is None or facts.get("gather_axis", 0) != 0:
        raise NotDecoded("GatherBlockQuantized with computed codes or along another axis")
    bits = int(facts.get("bits", 4))
    packed = kind == onnx.TensorProto.UINT8 and bits < 8
    codes = (_nibbles(table, bits) if packed else table).astype(np.float32)
    block = codes.shape[1] // scales.shape[1]
    if zeros is not None:
        shift = (_nibbles(zeros, bits) if packed else zeros)[:, : scales.shape[1]].astype(np.float32)
    else:
        shift = np.full(scales.shape, 2.0 ** (bits - 1) if kind == onnx.TensorProto.UINT8 else 0.0, np.float32)
    values = (codes.reshape(len(codes), -1, block) - shift[..., None]) * scales[..., None].astype(np.float32)
    return np.asarray(values.reshape(len(codes), -1))
