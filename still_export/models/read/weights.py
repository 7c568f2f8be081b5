"""Lazy weights: an export has one tensor in memory at a time, never a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from still_export.errors import CheckpointError
from still_export.models.read.blocks import BlockWeight
from still_export.models.read.super_blocks import SuperBlocks

LORA_A, LORA_B = "lora_a", "lora_b"
"""Suffixes of the inputs for an adapter's matrices [K, R] and [R, N] at run time."""
TOGETHER = "|"
"""Separator of names of weights concatenated along the outputs."""


@dataclass(frozen=True)
class SourceBlocks:
    """Blocks of `size` inputs in a source.

    bits, offsets, zero_points, half_scales: Properties of the blocks. read: Returns them; for a stack, those of one expert. order: Inputs
    [K] in the blocks' order, if it is not the weight's. float8: Codes are e4m3.
    """

    bits: int
    offsets: bool
    half_scales: bool
    read: Callable[..., BlockWeight]
    size: int = 32
    zero_points: bool = False
    order: np.ndarray | None = None
    float8: bool = False

    @cached_property
    def negative(self) -> bool:
        """Whether a scale is negative; reads the blocks of a matrix."""
        return bool((self.read().scales < 0).any())


@dataclass(frozen=True)
class Deferred:
    """A tensor of known shape and type; every call of `read` reads the values again.

    `read` raises CheckpointError if the values are damaged or exceed the type's range.

    Args:
        blocks: The source's blocks, if they have a form of BlockWeight.
        bits: Bits of the source's codes; 0: no codes.
        adapted: The weight without LoRA, and its LoRA pairs.
        narrow: Reads the same values in a type of half the bytes, if the source stores them so.
        exact: Reads the values in the source's own type, if `dtype` is another.
        super_blocks: The source's blocks, if they are K-quants.
        part: Reads one entry of the first dimension, in the type of `narrow` if there is one; None: only the whole can be read.
        rows: Reads a slice of the first dimension that starts at a multiple of 8, if the source can.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]
    blocks: SourceBlocks | None = None
    bits: int = 0
    adapted: Adapted | None = None
    narrow: Callable[[], Tensor] | None = None
    exact: Callable[[], Tensor] | None = None
    part: Callable[[int], Tensor] | None = None
    super_blocks: SuperBlocks | None = None
    rows: Callable[[slice], Tensor] | None = None

    def dim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Pair:
    """LoRA: scale b a is added to a weight; a [r, K], b [N, r]."""

    a: Weight
    b: Weight
    scale: float


@dataclass(frozen=True)
class Adapted:
    """A weight without its LoRA pairs; `base` None: zero."""

    base: Weight | None
    pairs: tuple[Pair, ...]


Weight = Tensor | Deferred
Weights = Mapping[str, Weight]
"""Weights by the name of the model's parameter."""


def duplicate_error(name: str, first: str, second: str) -> CheckpointError:
    """The error for two tensors of a checkpoint that are the same parameter."""
    return CheckpointError(
        f"the checkpoint has {name} twice, as {first} and as {second}: which of them counts is unknown. Delete the outdated one."
    )


def is_coded(weight: Weight) -> bool:
    """Whether the source stores the weight, without LoRA pairs, as low-bit codes."""
    base = weight.adapted.base if isinstance(weight, Deferred) and weight.adapted is not None else weight
    return isinstance(base, Deferred) and base.bits > 0


def value_of(weight: Weight) -> Tensor:
    return weight.read() if isinstance(weight, Deferred) else weight


def exact_value_of(weight: Weight) -> Tensor:
    """The values as the source stores them, unrounded, for computing others from them."""
    return weight.exact() if isinstance(weight, Deferred) and weight.exact else value_of(weight)


def narrow_value_of(weight: Weight) -> Tensor:
    """The same values in the smallest available type."""
    return weight.narrow() if isinstance(weight, Deferred) and weight.narrow else value_of(weight)


def row_pieces(weight: Weight, count: int) -> Iterator[Tensor]:
    """The values, at most `count` rows at a time, in the smallest available type."""
    rows = weight.rows if isinstance(weight, Deferred) else None
    rows = rows or narrow_value_of(weight).__getitem__
    for start in range(0, weight.shape[0], count):
        yield rows(slice(start, min(start + count, weight.shape[0])))


def stand_ins(weights: Weights) -> dict[str, Tensor]:
    """Meta tensors for `weights`, with shape, type and device, which suffices for a trace."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        return {name: torch.empty(weight.shape, dtype=weight.dtype) for name, weight in weights.items()}
