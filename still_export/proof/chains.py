"""Chains of calls that a model answers, each call from the state of the one before. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from still_export.package.calls import Arrays, image_inputs
from still_graphs.states import StateTable

HIDDEN = "hidden"
"""Name of a layer's hidden states as an output, `present_hidden.<layer>`; no package has it."""
Keep = Callable[[str], bool]
_STATE_TYPES = {"float64": "float32"}
"""Types of states in chains that differ from the model's."""


def everything(name: str) -> bool:
    return True


def nothing(name: str) -> bool:
    return False


@dataclass(frozen=True)
class ChainCall:
    """One call of a chain, which takes the states that the call before it left.

    Args:
        tokens: [B, T], right-padded.
        new_tokens: Tokens that each sequence brings, int64 [B].
        keep: Of the outputs `present_<state>.<layer>`, those that are kept.
        every: Logits of every token, where the package gives those of the last.
        inputs: What layers 1, 2, ..., and behind the last the model's norm, read in the place of what the layer before gave, [B, T, C]
            each; what that gave is kept then.
        given: What the call has of images, by `still_graphs.states.IMAGE_INPUTS`, over its tokens.
    """

    tokens: np.ndarray
    new_tokens: np.ndarray
    keep: Keep = everything
    every: bool = False
    inputs: Sequence[np.ndarray] = ()
    given: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class Chain:
    """Calls one after the other.

    Args:
        start: `past_length` and the states before the first call, `past_<state>.<layer>`.
        calls: In order.
        follow: Choices to make whatever the scores are. By ~layer: experts of each token, [B, N, k], -1 for the best by score. By layer,
            for hybrid attention: offsets of each chunk, int [B, HS, chunks, k], -1 for the best by score; or another runtime's selected
            keys, [B, HS, N, D], of which the nearest tokens are selected, zeros for the best by score.
    """

    start: Arrays
    calls: Sequence[ChainCall]
    follow: dict[int, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, feed: Arrays, keep: Keep = everything) -> Chain:
        """The single call of `feed`."""
        return cls(feed, [ChainCall(feed["input_ids"], feed["new_tokens"], keep, given=image_inputs(feed))])


def empty_feed(table: StateTable, batch: int, capacity: int) -> Arrays:
    """`past_length` and `past_*` of empty sequences with room for `capacity` tokens."""
    shapes = table.shapes(batch, table.rows(capacity))
    feed = {state.past: zeros(shapes[state.name], _STATE_TYPES.get(state.dtype, state.dtype)) for state in table}
    return {**feed, "past_length": np.zeros(batch, np.int64)}


def zeros(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Zeros that need no memory (one broadcast number); `numpy.zeros` may reuse touched memory."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))
