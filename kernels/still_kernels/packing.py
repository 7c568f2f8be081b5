"""Rows of different lengths, one behind the other, each with its own row of a larger state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where the B rows of packed tokens begin, and which row of the state each owns.

    query_start: First token of each row, then the number of all, int32 or int64 [B + 1].
    state_row: Row of the state, distinct, int32 or int64 [B].
    max_tokens: An upper bound of the tokens of one row; 1 takes the decode kernels.
    """

    query_start: Tensor
    state_row: Tensor
    max_tokens: int

    def tensors(self) -> dict[str, Tensor]:
        """By the names that the kernels have for them."""
        return {"query_start": self.query_start, "state_row": self.state_row}


def size_of_call(query: Tensor, packing: Packing | None, rows: int) -> tuple[int, int, tuple[int, int] | None]:
    """B, T and, where rows are packed, (tokens of all rows, rows of the state).

    Args:
        query: [B, T, H, D], or [tokens, H, D] with a packing.
        rows: Rows of the state.
    """
    if packing is None:
        return query.shape[0], query.shape[1], None
    return packing.state_row.shape[0], packing.max_tokens, (query.shape[0], rows)
