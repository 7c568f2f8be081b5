"""Packed sequences of different lengths, each with its own row of a larger state."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where the B sequences of packed tokens begin, and which row of the state each owns.

    query_start: First token of each sequence, then the number of all, int32 or int64 [B + 1].
    state_row: Row of the state, distinct, int32 or int64 [B].
    max_tokens: An upper bound of the tokens of one sequence; 1 takes the decode kernels.
    pages: Where an engine owns the states: how they lie in its pages, as the op has it. state_row is then the table of their pages,
        int32 [B, columns], contiguous; lengths are those of the call's B sequences, not of the state's rows, and what a page holds of
        an earlier one counts for nothing. None: every state is contiguous.
    """

    query_start: Tensor
    state_row: Tensor
    max_tokens: int
    pages: Hashable | None = None

    def tensors(self) -> dict[str, Tensor | None]:
        """Tensors by the kernels' names."""
        return {"query_start": self.query_start, "state_row": self.state_row}


@dataclass(frozen=True)
class PagedStates:
    """States of packed sequences in an engine's pages, which are never cleared.

    memory: int8 [pages, bytes]; a page's bytes side by side, the op's `Pages.size_bytes` from one to the next.
    length: Tokens of the call's B sequences before the call, [B], which the caller advances; one of length 0 starts empty, whatever its
        pages hold.
    packing: With `pages`, and a table of each sequence's pages: those of the tokens that it has after the call, any number behind them.
    """

    memory: Tensor
    length: Tensor
    packing: Packing


def size_of_call(query: Tensor, packing: Packing | None, rows: int) -> tuple[int, int, tuple[int, int] | None]:
    """B, T and, where sequences are packed, (tokens of all of them, rows of the state).

    Args:
        query: [B, T, H, D], or [tokens, H, D] with a packing.
        rows: Rows of the state.
    """
    if packing is None:
        return query.shape[0], query.shape[1], None
    return packing.state_row.shape[0], packing.max_tokens, (query.shape[0], rows)
