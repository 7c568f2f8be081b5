"""GGUF's K-quants, whose blocks have integer scales: as files store them, and in the layout that MatMulNBits' OpSpec defines, without
loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from still_export.gguf.types import FORMS
from still_kernels.matmul_nbits.spec import SUPER, TILE, WORDS

SLAB_ROWS = 4096
"""Outputs converted at a time: a head has more codes than should be in memory as bytes."""
SLAB_BYTES = 1 << 20
"""Numbers made at a time, so that they stay in the cache."""
LOW, TWO = np.uint32(0x0F0F0F0F), np.uint32(0x03030303)
"""Masks for each of four bytes: a code's low bits, and two high ones."""
_PAIRS = np.array([0, 2, 4, 6], np.uint8)[:, None]
"""Shifts of four 2-bit fields in a byte."""


@dataclass(frozen=True)
class SuperBlocks:
    """A weight [N, K] of K-quants in a source.

    Args:
        bits: 4 or 6.
        read: Gets its rows, uint8 [N, K / SUPER * bytes].
    """

    bits: int
    read: Callable[[], np.ndarray]

    @property
    def block(self) -> int:
        """Inputs that share a scale."""
        return 32 if self.bits == 4 else 16


def tile_words(rows: np.ndarray, bits: int) -> np.ndarray:
    """The words int32 [N, W] of the OpSpec's input `blocks`.

    Args:
        rows: As SuperBlocks reads them, of a multiple of TILE outputs.
    """
    return np.concatenate([_words(rows[i : i + SLAB_ROWS], bits) for i in range(0, len(rows), SLAB_ROWS)])


def tile_numbers(rows: np.ndarray, bits: int) -> np.ndarray:
    """The numbers float16 [N, S] of its input `scales`."""
    raw = _raw(rows, bits)
    numbers = np.ascontiguousarray(raw[..., :4] if bits == 4 else raw[..., -2:]).view("<f2")
    return np.ascontiguousarray(numbers.transpose(0, 2, 3, 1)).reshape(len(rows), -1)


def from_tiles(words: np.ndarray, numbers: np.ndarray, bits: int) -> np.ndarray:
    """The weight float32 [N, K] from words and numbers, equal to the gguf package's decoding of the file."""
    outputs, supers = len(words), words.shape[1] // WORDS[bits]
    found = np.empty((outputs // TILE, TILE, supers, SUPER), np.float32)
    data = np.ascontiguousarray(words).view("<u4").reshape(-1, supers, WORDS[bits] * TILE)
    halves = numbers.reshape(len(data), supers, -1, TILE)
    size = max(1, SLAB_BYTES // (TILE * supers * SUPER * 4))
    for start in range(0, len(data), size):
        part = slice(start, start + size)
        _numbers_of(data[part], halves[part].astype(np.float32), bits, found[part])
    return found.reshape(outputs, -1)


def _numbers_of(data: np.ndarray, wide: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Fill `out` with weights [tiles, TILE, supers, SUPER], from words [tiles, supers, W] and numbers [tiles, supers, 1 or 2, TILE].

    Codes are permuted as words of four, before they become numbers of eight times the bytes.
    """
    count, supers, _ = data.shape
    scales = np.ascontiguousarray(data[..., :32]).view(np.uint8).reshape(count, supers, -1, TILE)
    words = data[..., 32:].reshape(count, supers, -1, TILE).transpose(0, 3, 1, 2)  # [tiles, TILE, supers, words]
    if bits == 4:
        codes = np.empty((*words.shape, 2), "<u4")
        codes[..., 0], codes[..., 1] = words & LOW, words >> 4 & LOW
        _scaled(codes.view(np.uint8), wide[:, :, :1] * scales[:, :, :8], out)
        least = wide[:, :, 1:] * scales[:, :, 8:]
        out.reshape(count, TILE, supers, 8, 32)[...] -= _per_weight(least)
    else:
        words = words.reshape(*words.shape[:3], 16, 3)
        first, second, high = (words[..., i] for i in range(3))
        codes = np.empty((*first.shape, 4), "<u4")
        for i, low in enumerate((first, first >> 4, second, second >> 4)):
            codes[..., i] = low & LOW | (high >> 2 * i & TWO) << 4
        _scaled(codes.view(np.int8) - np.int8(32), wide * scales.view(np.int8), out)


def _scaled(codes: np.ndarray, step: np.ndarray, out: np.ndarray) -> None:
    """Codes [tiles, TILE, supers, SUPER] times their blocks' steps [tiles, supers, blocks, TILE]."""
    shape = (*out.shape[:3], step.shape[2], SUPER // step.shape[2])
    np.multiply(codes.reshape(shape), _per_weight(step), out=out.reshape(shape), dtype=np.float32)


def _per_weight(blocks: np.ndarray) -> np.ndarray:
    """Numbers [tiles, supers, blocks, TILE] in the order of weights, [tiles, TILE, supers, blocks, 1]."""
    return blocks.transpose(0, 3, 1, 2)[..., None]


def _raw(rows: np.ndarray, bits: int) -> np.ndarray:
    """[tiles, TILE, supers, bytes]."""
    size = {bits: size for bits, _, size in FORMS.values()}[bits]
    return rows.reshape(-1, TILE, rows.shape[1] // size, size)


def _words(rows: np.ndarray, bits: int) -> np.ndarray:
    raw = _raw(np.ascontiguousarray(rows), bits)
    count, _, supers, _ = raw.shape
    if bits == 4:
        from gguf.quants import Q4_K

        pair = Q4_K.get_scale_min(np.ascontiguousarray(raw[..., 4:16]).reshape(-1, 12))
        scales = np.stack(pair, axis=1).reshape(count, TILE, supers, 16)
        halves = raw[..., 16:].reshape(count, TILE, supers, 4, 1, 32)  # low halves are one block, high ones the next
        codes = np.concatenate([halves & 15, halves >> 4], axis=4).reshape(count, TILE, supers, 8, 4, 2, 4)
        packed = codes[..., 0, :] | codes[..., 1, :] << 4  # [tiles, TILE, supers, 8, 4, 4]
        laid = packed.transpose(0, 2, 3, 4, 1, 5)
    else:
        scales = raw[..., 192:208]
        low = raw[..., :128].reshape(count, TILE, supers, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
        high = raw[..., 128:192].reshape(count, TILE, supers, 2, 1, 32) >> _PAIRS & 3
        low, high = (x.reshape(count, TILE, supers, 16, 4, 4) for x in (low, high))
        first = (low[..., ::2, :] | low[..., 1::2, :] << 4).astype(np.uint8)
        second = np.bitwise_or.reduce(high << _PAIRS, axis=-2, keepdims=True)
        laid = np.concatenate([first, second.astype(np.uint8)], axis=-2).transpose(0, 2, 3, 4, 1, 5)
    data = np.concatenate(
        [scales.transpose(0, 2, 3, 1).reshape(count, supers, -1), laid.reshape(count, supers, -1)], axis=-1
    )
    return np.ascontiguousarray(data).view("<i4").reshape(len(rows), -1)
