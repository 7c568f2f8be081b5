"""Group prompts of different lengths for kernels whose workspace depends on the longest. No vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

ROOM_TOKENS = 8192
"""Most tokens of a call, including padding: 0.3 GiB of workspace for Llama-3.1-8B's sizes, for any mix of lengths."""
LEAST_TOKENS = 16


def ranges_of(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) of rows for one call each: rows times the longest stays within ROOM_TOKENS."""
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
    """The next power of two, so that there are few kinds of calls, whose layouts are reused."""
    return max(LEAST_TOKENS, 1 << (tokens - 1).bit_length())
