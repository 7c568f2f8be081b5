"""Checked counts of a call, shared by all bodies."""

from __future__ import annotations

from still_graphs.functions.builder import INT64, Scope

MOST_TOKENS = 1 << 40
"""Length limit of a sequence, as in the CPU kernels; products with it stay far below 64 bits."""


def checked_counts(b: Scope, tokens: str) -> tuple[str, str]:
    """past_length and new_tokens, [B, 1] each; a value outside 0..MOST_TOKENS or 0..T makes the call fail."""
    past, new = b.unsqueeze("past_length", 1), b.unsqueeze("new_tokens", 1)
    in_range = b.all_of(b("Equal", past, b("Clip", past, 0, MOST_TOKENS)), _at_most(b, new, tokens))
    zero = _zero(b, in_range, "past_length_or_new_tokens_out_of_range")
    return b("Add", past, zero), b("Add", new, zero)


def checked_new_tokens(b: Scope, tokens: str) -> str:
    """new_tokens, [B, 1]; a value outside 0..T makes the call fail."""
    new = b.unsqueeze("new_tokens", 1)
    return b("Add", new, _zero(b, _at_most(b, new, tokens), "new_tokens_out_of_range"))


def _at_most(b: Scope, new: str, tokens: str) -> str:
    return b("Equal", new, b("Clip", new, 0, b("Squeeze", tokens)))


def _zero(b: Scope, in_range: str, name: str) -> str:
    """0 where all of `in_range` hold; otherwise the node `name` fails.

    No standard op says "refuse": one takes row 0 of a table of one row, or row 1, which every runtime that checks its indices refuses.
    """
    wrong = b("Sub", 1, b("ReduceMin", b.cast(in_range, INT64), keepdims=0))
    return b("Gather", [0], wrong, name=name)
