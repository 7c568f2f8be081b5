"""GGUF tensors as weights: llama.cpp's conversion is undone; blocks stay if that moves whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from still_export.errors import CheckpointError
from still_export.gguf.edits import AS_IT_IS, Edit
from still_export.gguf.types import BLOCK, BLOCKS, FORMS, bits_of
from still_export.models.gguf.quants import checked_rows, dequantized, read_blocks
from still_export.models.read.blocks import BlockWeight
from still_export.models.read.checkpoint import checked, in_range
from still_export.models.read.super_blocks import SuperBlocks
from still_export.models.read.weights import Deferred, SourceBlocks
from still_kernels.matmul_nbits.spec import SUPER

_HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Stored:
    """A tensor of the file, or one expert's part.

    Args:
        expert: Its number in the first dimension; None: all.
        factors: Multiply the values: one for all, or for each expert; None: 1.
    """

    tensor: Any
    origin: str
    expert: int | None = None
    factors: np.ndarray | None = None

    @property
    def kind(self) -> str:
        """GGUF's name of its type."""
        return str(self.tensor.tensor_type.name)

    @property
    def shape(self) -> torch.Size:
        """Shape in PyTorch's order."""
        whole = torch.Size(int(size) for size in reversed(self.tensor.shape))
        return whole if self.expert is None else whole[1:]

    @property
    def raw(self) -> np.ndarray:
        """Its rows as stored, [N, ...]."""
        return np.asarray(self.tensor.data if self.expert is None else self.tensor.data[self.expert])

    def values(self) -> Tensor:
        """float32; errors: see `dequantized`.

        Raises:
            CheckpointError: The number of factors is not that of the experts.
        """
        found = dequantized(self.raw, self.tensor.tensor_type, self.shape, f"{self.tensor.name} in {self.origin}")
        if self.factors is None:
            return found
        experts = int(self.tensor.shape[-1]) if len(self.tensor.shape) == 3 else 1
        if len(self.factors) not in (1, experts):
            raise CheckpointError(
                f"{self.tensor.name} in {self.origin} has {len(self.factors)} scales for {experts} matrices. It is damaged; fetch it again."
            )
        if self.expert is None or len(self.factors) == 1:
            return found * torch.from_numpy(self.factors.copy()).reshape(-1, *[1] * (found.dim() - 1))
        return found * float(self.factors[self.expert])

    def halves(self) -> Tensor:
        """The values in the file's 16-bit type."""
        halves = torch.from_numpy(np.array(self.raw).view(np.int16)).view(_HALVES[self.kind])
        return halves.reshape(self.shape)


def weight(name: str, parts: Sequence[Stored], dtype: torch.dtype, edit: Edit = AS_IT_IS) -> Deferred:
    """The weight `name`: rows of `parts` concatenated, edited, as `dtype`."""
    first = parts[0]
    shape = torch.Size((sum(part.shape[0] for part in parts), *first.shape[1:]))
    if edit.flat:
        shape = torch.Size((sum(part.shape.numel() for part in parts),))
    kinds = {part.kind for part in parts}
    kind = first.kind if len(kinds) == 1 and all(part.factors is None for part in parts) else ""
    blocks = super_blocks = None
    if edit.value is None and len(shape) == 2:
        moved = _whole_blocks(edit.columns, BLOCK)
        if kind in BLOCKS and moved is not None:
            blocks = SourceBlocks(*BLOCKS[kind], partial(_blocks, name, parts, edit.rows, moved))
        if kind in FORMS and _whole_blocks(edit.columns, SUPER) is not None and edit.columns is None:
            super_blocks = SuperBlocks(FORMS[kind][0], partial(_rows, name, parts, edit.rows))
    narrow = partial(_read, name, parts, edit, None) if kind in _HALVES and edit.value is None else None
    shape = shape if edit.value is None else edit.value(torch.empty(shape, device="meta")).shape
    return Deferred(
        shape,
        dtype,
        partial(_read, name, parts, edit, dtype),
        blocks,
        max(bits_of(part.kind) for part in parts),
        narrow=narrow if dtype == torch.float32 else None,
        super_blocks=super_blocks,
    )


def stack(name: str, stored: Stored, dtype: torch.dtype) -> Deferred:
    """A weight of all experts, read one expert at a time."""

    def part(number: int) -> Tensor:
        return _read(name, [replace(stored, expert=number)], AS_IT_IS, dtype)

    return Deferred(
        stored.shape, dtype, partial(_read, name, [stored], AS_IT_IS, dtype), None, bits_of(stored.kind), part=part
    )


def zeros(count: int, dtype: torch.dtype) -> Deferred:
    """A bias that the family has and the file lacks."""
    return Deferred(torch.Size((count,)), dtype, lambda: torch.zeros(count, dtype=dtype))


def _read(name: str, parts: Sequence[Stored], edit: Edit, dtype: torch.dtype | None) -> Tensor:
    """The values as `dtype`; None: in the file's type of 16 bits."""
    found = [part.values() if dtype is not None else part.halves() for part in parts]
    if edit.flat:
        found = [value.flatten() for value in found]
    value = edit.applied(found[0] if len(found) == 1 else torch.cat(found))
    if dtype is not None:
        value = in_range(name, value, dtype, f" in {parts[0].origin}")
    return checked(name, value.contiguous(), None, parts[0].origin)


def _whole_blocks(columns: np.ndarray | None, size: int) -> np.ndarray | slice | None:
    """Order of blocks of `size` columns for the column order `columns`; None: it splits blocks."""
    if columns is None:
        return slice(None)
    if len(columns) % size:
        return None
    blocks = columns.reshape(-1, size)
    begins = blocks[:, 0]
    whole = (begins % size == 0).all() and (blocks == begins[:, None] + np.arange(size)).all()
    return begins // size if whole else None


def _raw(parts: Sequence[Stored], rows: np.ndarray | None) -> np.ndarray:
    """uint8 [N, bytes]."""
    arrays = [part.raw.view(np.uint8).reshape(part.shape[0], -1) for part in parts]
    whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return whole if rows is None else whole[rows]


def _blocks(name: str, parts: Sequence[Stored], rows: np.ndarray | None, moved: np.ndarray | slice) -> BlockWeight:
    origin = f"{name} in {parts[0].origin}"
    return read_blocks(_raw(parts, rows), parts[0].kind, origin).columns(moved)


def _rows(name: str, parts: Sequence[Stored], rows: np.ndarray | None) -> np.ndarray:
    return checked_rows(_raw(parts, rows), parts[0].kind, f"{name} in {parts[0].origin}")
