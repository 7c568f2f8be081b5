"""Rounding of weights: to the nearest of a block's codes, or of an output's; with zero points bit for bit as onnxruntime.quantization."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from still_export.models.read.blocks import BlockWeight, Float8Weight, joined, pack
from still_export.models.read.rows import int8_rows

SLAB_WEIGHTS = 1 << 22
"""Weights rounded at a time."""
RTN_WEIGHTS = 1 << 19
"""The same with zero points: temporaries then fit the processor's cache, in a quarter of onnxruntime.quantization's time."""
ALMOST_HALF = 0.5 - 2.0**-25
"""Added to a float32 of at least 0 before truncation, to round half up; 0.5 would also round up the number just below 0.5."""
LEAST_SCALE = 2.0**-24
"""Smallest float16: smaller scales would be stored as 0, which TensorRT refuses."""


def quantize(weight: torch.Tensor, bits: int, block_size: int, zero_points: bool = True) -> BlockWeight:
    """Round `weight`.

    Args:
        weight: [N, K], of any type of floats, K a multiple of `block_size`.
        bits: 4, or 8, without zero points.
        zero_points: Of 4 bits; without, every scale is positive, as TensorRT needs it.

    Returns:
        The blocks, scales in float32.
    """
    if zero_points:
        with _one_thread_each() as pool:
            round_slab = partial(_rtn, bits=bits, block_size=block_size)
            return joined(pool.map(round_slab, _slabs(weight, RTN_WEIGHTS)), len(weight))
    return joined((_positive(slab.float().numpy(), bits, block_size) for slab in _slabs(weight)), len(weight))


def quantize_outputs(weight: torch.Tensor) -> BlockWeight:
    """Round `weight` [N, K], of any type of floats, to 8 bits with a scale for each output."""
    return joined(map(_outputs, _slabs(weight)), len(weight))


def float8(weight: torch.Tensor, block_size: int) -> Float8Weight:
    """Round `weight` [N, K], of any type of floats, to e4m3, to nearest; the largest magnitude of a block is the type's."""
    shape = (len(weight), weight.shape[1] // block_size)
    packed, scales, row = np.empty((*shape, block_size), np.uint8), np.empty(shape, np.float32), 0
    for slab in _slabs(weight):
        blocks = slab.float().unflatten(1, (-1, block_size))
        scale = blocks.abs().amax(-1) / torch.finfo(torch.float8_e4m3fn).max
        codes = (blocks / torch.where(scale > 0, scale, 1)[..., None]).to(torch.float8_e4m3fn)
        rows = slice(row, row := row + len(slab))
        packed[rows], scales[rows] = codes.view(torch.uint8).numpy(), scale.numpy()
    return Float8Weight(packed, scales, None, 8)


def relative_error(made: BlockWeight, weight: torch.Tensor) -> float:
    """Norm of the rounding error divided by the norm of `weight` [N, K]."""
    lost = whole = row = 0.0
    for slab in map(lambda x: x.float().numpy(), _slabs(weight)):
        rows = slice(int(row), int(row) + len(slab))
        lost += float(np.square(made.rows(rows).dequantized() - slab).sum())
        whole, row = whole + float(np.square(slab).sum()), rows.stop
    return (lost / whole) ** 0.5 if whole else 0.0


def _outputs(weight: torch.Tensor) -> BlockWeight:
    rows, scales = (x.numpy() for x in int8_rows(weight))
    packed = (rows.astype(np.int16) + 128).astype(np.uint8)
    return BlockWeight(packed[:, None], scales[:, None].astype(np.float32), None, 8)


def _slabs(weight: torch.Tensor, size: int = SLAB_WEIGHTS) -> tuple[torch.Tensor, ...]:
    return weight.split(max(1, size // weight.shape[1]))


@contextmanager
def _one_thread_each() -> Iterator[ThreadPoolExecutor]:
    """As many threads as PyTorch uses, each with one PyTorch thread: otherwise PyTorch would split each small step and wait."""
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence onnxruntime.quantization, which configures logging at import and logs every step."""
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)
    try:
        with np.errstate(divide="ignore", invalid="ignore"):
            yield
    finally:
        root.removeHandler(handler)


def _positive(weight: np.ndarray, bits: int, block_size: int) -> BlockWeight:
    """Symmetric rounding to nearest with positive scales; onnxruntime.quantization's uses the signed extreme of a block."""
    with _quiet():
        from onnxruntime.quantization.neural_compressor.weight_only import quant_tensor

        codes, scales, _ = quant_tensor(weight, bits, block_size, "sym", "int")
    tiny = scales < LEAST_SCALE
    codes, scales = np.where(tiny, 0, codes), np.where(tiny, LEAST_SCALE, scales)
    shape = (len(weight), weight.shape[1] // block_size)
    packed = pack((codes.reshape(*shape, block_size) + (1 << (bits - 1))).astype(np.uint8), bits)
    return BlockWeight(packed, scales.reshape(shape).astype(np.float32), None, bits)


def _rtn(weight: torch.Tensor, bits: int, block_size: int) -> BlockWeight:
    """Rounding with the signed extreme of a block at the smallest code; 8 bits around the middle."""
    most, middle = (1 << bits) - 1, 1 << (bits - 1)
    values = weight.float().unflatten(1, (-1, block_size))
    low, high = values.amin(-1).clamp_max_(0), values.amax(-1).clamp_min_(0)
    scale = torch.where(high.abs() > low.abs(), high, low) / -middle if bits == 8 else (high - low) / most
    some = torch.where(scale != 0, scale, torch.inf)
    zero = torch.full_like(scale, middle, dtype=torch.uint8) if bits == 8 else _codes(-low / some, most)
    packed = pack(_codes((values * (1 / some)[..., None]).add_(zero[..., None]), most).numpy(), bits)
    filled = torch.nn.functional.pad(zero, (0, zero.shape[1] % 2), value=middle)
    return BlockWeight(packed, scale.numpy(), None if bits == 8 else pack(filled.numpy(), bits), bits)


def _codes(values: torch.Tensor, most: int) -> torch.Tensor:
    """`values` (overwritten) rounded to the nearest of 0 to `most`."""
    return values.clamp_(0, most).add_(ALMOST_HALF).to(torch.uint8)
