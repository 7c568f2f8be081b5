"""The least that products with weights in blocks move and compute: (bytes, FLOP), with 16-bit activations."""

from __future__ import annotations


def cost(outputs: int, inputs: int, bits: int, block_size: int, zero_points: bool, rows: int) -> tuple[float, float]:
    """Of `rows` rows: codes, scales and zero points read once, tokens in and out."""
    blocks = outputs * (inputs // block_size)
    weight = outputs * inputs * bits / 8 + blocks * (2 + (bits / 8 if zero_points else 0))
    return weight + 2 * rows * (outputs + inputs), 2.0 * rows * outputs * inputs
