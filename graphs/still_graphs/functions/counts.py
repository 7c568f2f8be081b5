"""Counts of a call, as all bodies take them."""

from __future__ import annotations

from still_graphs.functions.builder import INT64, Scope

MOST_TOKENS = 1 << 40
"""The longest sequence, as in the CPU kernels: products with it stay far from the end of 64 bits."""


def checked_counts(b: Scope, tokens: str) -> tuple[str, str]:
    """past_length and new_tokens, [B, 1] each; a call that has one outside 0..MOST_TOKENS or 0..T fails.

    No standard op says "refuse": one takes row 0 of a table of one row, or row 1, which every runtime that checks its indices refuses.
    """
    past, new = b.unsqueeze("past_length", 1), b.unsqueeze("new_tokens", 1)
    in_range = b.all_of(
        b("Equal", past, b("Clip", past, 0, MOST_TOKENS)), b("Equal", new, b("Clip", new, 0, b("Squeeze", tokens)))
    )
    wrong = b("Sub", 1, b("ReduceMin", b.cast(in_range, INT64), keepdims=0))
    zero = b("Gather", [0], wrong, name="past_length_or_new_tokens_out_of_range")
    return b("Add", past, zero), b("Add", new, zero)
