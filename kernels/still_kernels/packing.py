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
