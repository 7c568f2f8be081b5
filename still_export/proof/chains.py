"""What a model is asked, without torch: chains of calls, whose states go on from call to call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from still_export.package.calls import Arrays, given_of
from still_graphs.states import StateTable

HIDDEN = "hidden"
"""What a layer gives, as an output `present_hidden.<layer>` that no package has."""
Keep = Callable[[str], bool]
_KEPT = {"float64": "float32"}
"""Types that states are given in, where they are not those that the model has."""


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
        given: What the call has of images, by `still_graphs.states.GIVEN`, over its tokens.
    """

    tokens: np.ndarray
    new_tokens: np.ndarray
    keep: Keep = everything
    every: bool = False
    inputs: Sequence[np.ndarray] = ()
    given: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class Chain:
    """Calls one after the other; `start` holds `past_length` and the states before the first, `past_<state>.<layer>`. `follow` are choices
    whatever the scores. By ~layer experts that tokens go to, [B, N, k]; -1: those of the best scores. By layer what hybrid attention
    selects: of each chunk the offsets, int [B, HS, chunks, k], -1: by scores; or the keys that another runtime kept, [B, HS, N, D], the
    nearest of the chunk are selected; zeros: by scores."""

    start: Arrays
    calls: Sequence[ChainCall]
    follow: dict[int, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, feed: Arrays, keep: Keep = everything) -> Chain:
        """The single call that `feed` describes."""
        return cls(feed, [ChainCall(feed["input_ids"], feed["new_tokens"], keep, given=given_of(feed))])


def empty_feed(table: StateTable, batch: int, capacity: int) -> Arrays:
    """`past_length` and `past_*` of sequences that have seen nothing, with room for `capacity` tokens."""
    shapes = table.shapes(batch, table.rows(capacity))
    feed = {state.past: zeros(shapes[state.name], _KEPT.get(state.dtype, state.dtype)) for state in table}
    return {**feed, "past_length": np.zeros(batch, np.int64)}


def zeros(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """One zero, read everywhere: what `numpy.zeros` gives is memory where the C library has some to use again."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))
