"""Sequences of different lengths in one row of tokens, each with its own row of a larger state."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Positions of B packed sequences, and their rows of the state.

    query_start: First token of each sequence, then the total, int32 or int64 [B + 1].
    state_row: Distinct row of the state for each sequence, int32 or int64 [B].
    max_tokens: Upper bound of tokens per sequence; 1 selects the decode kernels.
    pages: Layout of the states in an engine's pages, of the op's own type. state_row is then the page table, int32 [B, columns],
        contiguous. Lengths are then those of the call's B sequences, and old contents of a page are ignored. None: states are contiguous.
    """

    query_start: Tensor
    state_row: Tensor
    max_tokens: int
    pages: Hashable | None = None

    def tensors(self) -> dict[str, Tensor | None]:
        """Tensors by their names in kernels."""
        return {"query_start": self.query_start, "state_row": self.state_row}


@dataclass(frozen=True)
class PagedStates:
    """States of packed sequences in an engine's pages, which are not cleared.

    memory: int8 [pages, bytes]. A page's bytes are contiguous; pages are the op's `Pages.size_bytes` apart.
    length: Tokens of the call's B sequences before the call, [B]; the caller advances it. Length 0 starts empty, whatever the pages
    contain.
    packing: With `pages` and the page table of each sequence: the pages of its tokens after the call, then any others.
    """

    memory: Tensor
    length: Tensor
    packing: Packing


def size_of_call(query: Tensor, packing: Packing | None, rows: int) -> tuple[int, int, tuple[int, int] | None]:
    """(B, T, None or, for packed sequences, (tokens of all sequences, rows of the state)).

    Args:
        query: [B, T, H, D], or [tokens, H, D] with a packing.
        rows: Rows of the state.
    """
    if packing is None:
        return query.shape[0], query.shape[1], None
    return packing.state_row.shape[0], packing.max_tokens, (query.shape[0], rows)
