"""Weights in blocks along a product's inputs, in the layout of com.microsoft::MatMulNBits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
        outputs, blocks, _ = self.packed.shape
        codes = unpack(self.packed, self.bits).astype(np.float32)
        zero: np.ndarray | int = 1 << (self.bits - 1)
        if self.zero_points is not None:
            zero = unpack(self.zero_points, self.bits)[:, :blocks, None].astype(np.float32)
        values = (codes - zero) * self.scales[:, :, None].astype(np.float32)
        if self.offsets is not None:
            values += self.offsets[:, :, None]
        return values.reshape(outputs, -1)

    def rows(self, order: np.ndarray) -> BlockWeight:
        """The same weight with its outputs in another order."""
        zero, offsets = (None if x is None else x[order] for x in (self.zero_points, self.offsets))
        return BlockWeight(self.packed[order], self.scales[order], zero, self.bits, offsets)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes along the last axis as bytes; an odd number of 4-bit codes is filled up with 0."""
    if bits == 8:
        return codes.astype(np.uint8)
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    codes = codes.astype(np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes of bytes along the last axis."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def joined(parts: list[BlockWeight]) -> BlockWeight:
    """Rows of several weights below each other."""
    zero = [p.zero_points for p in parts if p.zero_points is not None]
    return BlockWeight(
        np.concatenate([p.packed for p in parts]),
        np.concatenate([p.scales for p in parts]),
        np.concatenate(zero) if zero else None,
        parts[0].bits,
    )
