"""How prompts of different lengths are put together for kernels whose workspace is sized by the longest. No vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

ROOM_TOKENS = 8192
"""Tokens, padding counted, of one call: 0.3 GiB of workspace at the sizes of Llama-3.1-8B, however lengths are mixed."""
LEAST_TOKENS = 16


def ranges_of(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) of rows that one call takes: as many, one after the other, as keep rows times the longest within ROOM_TOKENS."""
    first = longest = 0
    for i, count in enumerate(counts):
        most = max(longest, count)
        if i > first and most * (i + 1 - first) > ROOM_TOKENS:
            yield first, i
            first, most = i, count
        longest = most
    if len(counts) > first:
        yield first, len(counts)


def rounded_up(tokens: int) -> int:
    """The next power of two: kinds of calls are few, and what is laid out for one is used again."""
    return max(LEAST_TOKENS, 1 << (tokens - 1).bit_length())
