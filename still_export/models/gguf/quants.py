"""GGUF's tensor types: decoded values, and blocks in formats that kernels read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from still_export.errors import CheckpointError
from still_export.gguf.types import BLOCK, BLOCKS, FORMS, K_BYTES, undone
from still_export.models.read.blocks import BlockWeight, pack

_WHOLE_NUMBERS = ("Q5_0", "IQ4_NL", "IQ4_XS", "MXFP4")


def dequantized(data: np.ndarray, kind: Any, shape: torch.Size, origin: str) -> Tensor:
    """Values of the type `kind` of the gguf package, float32; errors: see `undone`."""
    return torch.from_numpy(np.require(undone(data, kind, origin), np.float32, ["C", "W"])).reshape(shape)


def read_blocks(raw: np.ndarray, kind: str, origin: str) -> BlockWeight:
    """Rows of a type in BLOCKS, uint8 [N, bytes], with unchanged codes.

    Raises:
        CheckpointError: A scale or an offset is no number.
    """
    outputs = len(raw)
    if kind in _WHOLE_NUMBERS:
        return _whole_numbers(raw, kind, origin)
    if kind in ("Q5_1", "Q5_K"):
        return _five_bits(raw, kind, origin)
    bits, has_offsets, _ = BLOCKS[kind]
    fields = 2 if has_offsets else 1
    blocks = raw.reshape(outputs, -1, K_BYTES if kind == "Q4_K" else 2 * fields + BLOCK * bits // 8)
    head = np.ascontiguousarray(blocks[..., : 2 * fields]).view("<f2").astype(np.float32)
    if not np.isfinite(head).all():
        raise _no_number(origin)
    codes, scales = blocks[..., 2 * fields :], head[..., 0]
    offsets = None
    if kind == "Q8_0":
        packed = (codes.view(np.int8).astype(np.int16) + 128).astype(np.uint8)
    else:  # the low halves are the first 16 codes, the high ones the others
        least = head[..., 1] if has_offsets else None
        if kind == "Q4_K":
            from gguf.quants import Q4_K

            factors, minima = Q4_K.get_scale_min(blocks[..., 4:16].reshape(-1, 12))
            scales = (scales.reshape(-1, 1) * factors).reshape(outputs, -1)
            least = -(head[..., 1].reshape(-1, 1) * minima).reshape(outputs, -1)
            codes = blocks[..., 16:].reshape(outputs, -1, BLOCK)  # low halves are one block, high ones the next
            packed = pack(np.stack([codes & 15, codes >> 4], axis=2).reshape(outputs, -1, BLOCK), 4)
        else:
            packed = pack(np.concatenate([codes & 15, codes >> 4], axis=-1), 4)
        if least is not None:
            offsets = least + 8 * scales  # MatMulNBits subtracts 8 of each code
    return BlockWeight(packed, scales, None, bits, offsets)


def _whole_numbers(raw: np.ndarray, kind: str, origin: str) -> BlockWeight:
    """Blocks of scale * integer values; dividing by the scale recovers the codes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind_of = GGMLQuantizationType[kind]
    blocks = raw.reshape(len(raw), -1, GGML_QUANT_SIZES[kind_of][1])
    if kind == "MXFP4":  # exponents; 255 is no number
        scales = np.where(blocks[..., 0] == 255, np.nan, np.exp2(blocks[..., 0].astype(np.float32) - 128))
    else:
        scales = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)[..., 0]
    if not np.isfinite(scales).all():
        raise _no_number(origin)
    if kind == "IQ4_XS":
        high = np.ascontiguousarray(blocks[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
        low = (blocks[..., 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(*blocks.shape[:2], 8)
        scales = (scales[..., None] * (low.astype(np.float32) + 16 * high - 32)).reshape(len(raw), -1)
    values = dequantize(raw, kind_of).reshape(len(raw), -1, BLOCK)
    codes = np.divide(values, scales[..., None], out=np.zeros_like(values), where=scales[..., None] != 0)
    return BlockWeight((np.rint(codes) + 128).astype(np.uint8), scales, None, 8)


def _five_bits(raw: np.ndarray, kind: str, origin: str) -> BlockWeight:
    """Codes of 0 to 31, whose fifth bits are stored separately, with offsets."""
    from gguf.quants import Q4_K

    outputs, wide = len(raw), kind == "Q5_K"
    blocks = raw.reshape(outputs, -1, 176 if wide else 24)
    head = np.ascontiguousarray(blocks[..., :4]).view("<f2").astype(np.float32)
    if not np.isfinite(head).all():
        raise _no_number(origin)
    scales, least = head[..., 0], head[..., 1]
    low: np.ndarray
    high: np.ndarray
    if wide:  # scales and offsets as in Q4_K
        factors, minima = Q4_K.get_scale_min(blocks[..., 4:16].reshape(-1, 12))
        scales = (scales.reshape(-1, 1) * factors).reshape(outputs, -1)
        least = -(least.reshape(-1, 1) * minima).reshape(outputs, -1)
        pairs = blocks[..., 48:].reshape(outputs, -1, 4, 1, BLOCK)  # low halves are one block, high ones the next
        low = (pairs >> np.array([0, 4], np.uint8)[:, None] & 15).reshape(outputs, -1, 8, BLOCK)
        high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    else:  # low halves are the first 16 codes, high ones the others
        low = np.concatenate([blocks[..., 8:] & 15, blocks[..., 8:] >> 4], axis=-1)
        high = np.unpackbits(blocks[..., 4:8], axis=-1, bitorder="little")
    # MatMulNBits subtracts 128. Codes around 0 amplify rounding errors of a token's values less.
    codes = (low | high << 4) + np.uint8(128 - 16)
    return BlockWeight(codes.reshape(outputs, -1, BLOCK), scales, None, 8, least + 16 * scales)


def checked_rows(rows: np.ndarray, kind: str, origin: str) -> np.ndarray:
    """Rows of a type in FORMS, uint8 [N, bytes], unchanged.

    Raises:
        CheckpointError: A scale is no number.
    """
    bits, _, size = FORMS[kind]
    numbers = rows.reshape(-1, size)[:, slice(0, 4) if bits == 4 else slice(size - 2, size)]
    if not np.isfinite(np.ascontiguousarray(numbers).view("<f2")).all():
        raise _no_number(origin)
    return rows


def _no_number(origin: str) -> CheckpointError:
    return CheckpointError(f"{origin} has a scale that is no number. The checkpoint is damaged; use another.")
