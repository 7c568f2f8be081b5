"""Weights in blocks along a linear layer's inputs, in the layout of com.microsoft::MatMulNBits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from still_kernels.dense_matmul.spec import NUMBERS

CACHED = 1 << 16
"""Weights decoded at a time, which fit the processor's cache: a pass over all of them costs as much as the arithmetic."""


@dataclass(frozen=True)
class BlockWeight:
    """A weight [N, K] of N outputs: w = scale * (code - zero point) + offset, block by block along K.

    Args:
        packed: Codes, uint8 [N, K / block, block * bits / 8]; of 4 bits two in a byte, the first one low.
        scales: [N, K / block], float.
        zero_points: uint8 [N, ceil(K / block * bits / 8)], packed like codes; None: the middle, 2^(bits - 1).
        bits: 4 or 8.
        offsets: [N, K / block], float, which MatMulNBits has no place for: a product of the sums over blocks; None: 0.
    """

    packed: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None
    bits: int
    offsets: np.ndarray | None = None

    def dequantized(self) -> np.ndarray:
        """The weight, float32 [N, K]."""
        outputs, blocks, width = self.packed.shape
        values = np.empty((outputs, blocks, width * 8 // self.bits), np.float32)
        size = max(1, CACHED // max(1, values[:1].size))
        for rows in (slice(start, start + size) for start in range(0, outputs, size)):
            packed, part = self.packed[rows], values[rows]
            if self.bits == 4:
                part[..., 0::2], part[..., 1::2] = packed & 15, packed >> 4
            else:
                part[...] = packed
            zero: np.ndarray | int = 1 << (self.bits - 1)
            if self.zero_points is not None:
                zero = unpack(self.zero_points[rows], self.bits)[:, :blocks, None]
            part -= zero
            part *= self.scales[rows, :, None].astype(np.float32)
            if self.offsets is not None:
                part += self.offsets[rows, :, None]
        return values.reshape(outputs, -1)

    def split(self, size: int) -> BlockWeight:
        """The same weight in blocks of `size`, a divisor of its own; parts of a block share its scale and zero point."""
        outputs, blocks, width = self.packed.shape
        times = width * 8 // self.bits // size
        if times == 1:
            return self
        zero = self.zero_points
        if zero is not None:
            zero = pack(np.repeat(unpack(zero, self.bits)[:, :blocks], times, axis=1), self.bits)
        offsets = None if self.offsets is None else np.repeat(self.offsets, times, axis=1)
        packed = self.packed.reshape(outputs, blocks * times, -1)
        scales = np.repeat(self.scales, times, axis=1)
        return replace(self, packed=packed, scales=scales, zero_points=zero, offsets=offsets)

    def with_positive_scales(self, dtype: np.dtype) -> BlockWeight:
        """The same weight, bit for bit, with scales above 0 in `dtype`, as TensorRT requires; without zero points.

        With a negative scale, codes become their complements, so values are one scale smaller; the offset adds it. If a scale is 0 in
        `dtype`, codes become those of 0.
        """
        assert self.zero_points is None
        negative, dead = self.scales < 0, self.scales.astype(dtype) == 0
        packed = np.where(negative[..., None], ~self.packed, self.packed)
        packed = np.where(dead[..., None], np.uint8(0x88 if self.bits == 4 else 0x80), packed)
        scales = np.where(dead, self.scales.dtype.type(1), np.abs(self.scales))
        offsets = self.offsets
        if (turned := negative & ~dead).any():
            added = np.where(turned, scales, 0).astype(np.float32)
            offsets = added if offsets is None else offsets + added
        return replace(self, packed=packed, scales=scales, offsets=offsets)

    def rows(self, order: np.ndarray | slice) -> BlockWeight:
        """The weight with its outputs permuted, or a subset."""
        zero, offsets = (None if x is None else x[order] for x in (self.zero_points, self.offsets))
        return replace(self, packed=self.packed[order], scales=self.scales[order], zero_points=zero, offsets=offsets)

    def columns(self, order: np.ndarray | slice) -> BlockWeight:
        """The weight without zero points and with its blocks of inputs permuted."""
        assert self.zero_points is None
        offsets = None if self.offsets is None else self.offsets[:, order]
        return replace(self, packed=self.packed[:, order], scales=self.scales[:, order], offsets=offsets)


class Float8Weight(BlockWeight):
    """A block weight with e4m3 codes: w = scale * number."""

    def dequantized(self) -> np.ndarray:
        values = np.array(NUMBERS, np.float32)[self.packed] * self.scales[:, :, None].astype(np.float32)
        return values.reshape(len(values), -1)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes along the last axis as bytes; an odd number of 4-bit codes is padded with 0."""
    if bits == 8:
        return codes.astype(np.uint8)
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    pairs = np.ascontiguousarray(codes, np.uint8).view("<u2")
    return (pairs | pairs >> 4).astype(np.uint8)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes of bytes along the last axis."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def joined(parts: Iterable[BlockWeight], outputs: int) -> BlockWeight:
    """Rows of several weights concatenated, `outputs` in all; each part may be freed once the next is requested."""
    whole: BlockWeight | None = None
    row = 0
    for part in parts:
        if whole is None:
            arrays = (part.packed, part.scales, part.zero_points)
            packed, scales, zero = (None if x is None else np.empty((outputs, *x.shape[1:]), x.dtype) for x in arrays)
            assert packed is not None and scales is not None
            whole = BlockWeight(packed, scales, zero, part.bits)
        rows = slice(row, row := row + len(part.packed))
        whole.packed[rows], whole.scales[rows] = part.packed, part.scales
        if whole.zero_points is not None:
            whole.zero_points[rows] = part.zero_points
    assert whole is not None and row == outputs
    return whole
