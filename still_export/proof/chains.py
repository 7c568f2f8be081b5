"""Chains of calls that a model answers, each call from the state of the one before. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from still_export.package.calls import Arrays, image_inputs
from still_graphs.states import StateTable

Keep = Callable[[str], bool]
_STATE_TYPES = {"float64": "float32"}
"""Types of states in chains that differ from the model's."""


def everything(name: str) -> bool:
    return True


def nothing(name: str) -> bool:
    return False


@dataclass(frozen=True)
class ChainCall:
    """One call of a chain, from the states after the previous call.

    Args:
        tokens: [B, T], right-padded.
        new_tokens: Tokens of each sequence that are not padding, int64 [B].
        keep: Selects the outputs `present_<state>.<layer>` to keep.
        every: Logits of every token, also if the package computes only the last ones.
        images: Image inputs for the tokens, by name (`still_graphs.states.IMAGE_INPUTS`).
    """

    tokens: np.ndarray
    new_tokens: np.ndarray
    keep: Keep = everything
    every: bool = False
    images: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class Chain:
    """Calls one after the other.

    Args:
        start: `past_length` and the states before the first call, `past_<state>.<layer>`.
        calls: In order.
        choices: Choices that replace the best by score. By ~layer: experts of each token, [B, N, k]. By layer, for hybrid attention:
            offsets in each chunk, int [B, HS, chunks, k]; or another runtime's selected keys, [B, HS, N, D], for which the nearest
            tokens are selected. -1, or a key of zeros: the best by score.
    """

    start: Arrays
    calls: Sequence[ChainCall]
    choices: dict[int, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, feed: Arrays, keep: Keep = everything) -> Chain:
        """The single call of `feed`."""
        return cls(feed, [ChainCall(feed["input_ids"], feed["new_tokens"], keep, images=image_inputs(feed))])


def empty_feed(table: StateTable, batch: int, capacity: int) -> Arrays:
    """`past_length` and `past_*` of empty sequences with room for `capacity` tokens."""
    shapes = table.shapes(batch, table.rows(capacity))
    feed = {state.past: zeros(shapes[state.name], _STATE_TYPES.get(state.dtype, state.dtype)) for state in table}
    return {**feed, "past_length": np.zeros(batch, np.int64)}


def zeros(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Zeros without memory (one broadcast number); `numpy.zeros` may reuse touched memory."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))
