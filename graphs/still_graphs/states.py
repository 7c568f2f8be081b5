"""Rows of a state after a number of tokens, and the resulting shapes and sizes. Stdlib only.

The only Python code that evaluates a growth rule (`still_graphs.spec.Growth.resolve`). Exports copy this file into packages.
plugins/runner/states.cpp is its C++ counterpart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}
"""Bytes of one element by dtype name."""
NEXT_TOKEN = "next_token"
"""Output with the likeliest token for each row of logits, int32."""

LAST_HIDDEN = "last_hidden"
"""Output for MTP heads: hidden states after the last norm, float32."""
AHEAD = "mtp_"
"""Prefix of all inputs, outputs and states of an MTP head."""
EMBEDDINGS, POSITIONS = IMAGE_INPUTS = ("inputs_embeds", "position_ids")
"""Inputs with defaults, in graphs of vision models. Embeddings [B, T, C] replace tokens with id -1. Positions are int64 [3, B, T] (time,
height, width); -1: count tokens. Dimensions of 1 are repeated."""

ANY = 1 << 62
"""More tokens than any call has."""

REPLAY = "replay_"
"""Prefix of outputs for speculation: inputs of the ops that compute states."""


def rows_after(rule: Mapping[str, Any], tokens: int, capacity_tokens: int) -> int:
    """Rows of a state after `tokens` tokens, by its resolved growth rule.

    Args:
        rule: rows, per, lag, and `fixed`: the state always has the rows of the full capacity.
        tokens: Tokens of the longest row of the batch.
        capacity_tokens: Tokens that the state is sized for.
    """
    counted = capacity_tokens if rule["fixed"] else tokens
    return int(rule["rows"]) * max(0, -(-counted // int(rule["per"])) - int(rule["lag"]))


@dataclass(frozen=True)
class State:
    """One state of one layer, as in the manifest's state table.

    Args:
        name: `<state>.<layer>`; the graph has `past_<name>` and `present_<name>`.
        op: The op that has it; empty: a state of the runner, between calls.
        shape: "batch" first; the name of the growing dimension on the growth rule's axis; numbers elsewhere.
        dtype: Name of the element type.
        in_place: Past and present may share a buffer.
        growth: Resolved growth rule; None: its size is fixed.
    """

    name: str
    layer: int
    op: str
    shape: tuple[int | str, ...]
    dtype: str
    in_place: bool
    growth: Mapping[str, Any] | None = None

    @property
    def past(self) -> str:
        """Name of the graph input."""
        return f"past_{self.name}"

    @property
    def present(self) -> str:
        """Name of the graph output."""
        return f"present_{self.name}"

    @property
    def positions(self) -> bool:
        """Whether it has a row for each position, which the next token at that position overwrites."""
        return self.growth is not None and (self.growth["rows"], self.growth["per"], self.growth["lag"]) == (1, 1, 0)

    @property
    def late(self) -> bool:
        """Whether it gets the rows of a chunk when a later chunk begins."""
        return self.growth is not None and bool(self.growth["lag"])

    @property
    def apart(self) -> bool:
        """Whether rejected tokens leave something in it that is read later."""
        return not self.positions and not (self.late and self.growth is not None and not self.growth["fixed"])

    @property
    def ring(self) -> bool:
        """Whether its axis 2 holds two chunks, where a new chunk overwrites the rows of the older one."""
        return self.name.startswith("window_")

    def to_dict(self) -> dict[str, Any]:
        """The manifest's entry."""
        return {**vars(self), "shape": list(self.shape), "growth": None if self.growth is None else dict(self.growth)}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> State:
        """The state of a manifest's entry; KeyError or TypeError if malformed."""
        return cls(**{**entry, "shape": tuple(entry["shape"])})


class StateTable:
    """The states of a package.

    Args:
        states: In the graph's order.
        capacity_tokens: Tokens that the package is sized for.
        bounded: More tokens are an error; otherwise states fold or grow further.

    Raises:
        ValueError: Two states with one dimension name grow by different rules.
    """

    def __init__(self, states: Iterable[State], capacity_tokens: int, bounded: bool) -> None:
        self.states = tuple(states)
        self.capacity_tokens = capacity_tokens
        self.bounded = bounded
        self.growths: dict[str, Mapping[str, Any]] = {}
        for state in self.states:
            if state.growth is not None:
                known = self.growths.setdefault(str(state.growth["dimension"]), state.growth)
                if known != state.growth:
                    raise ValueError(
                        f"state {state.name} grows by {state.growth}, others of that dimension by {known}."
                    )

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> StateTable:
        """The state table in a package's manifest."""
        capacity = manifest["capacity"]
        states = (State.from_dict(entry) for entry in manifest["states"])
        return cls(states, int(capacity["capacity_tokens"]), bool(capacity["bounded"]))

    def __iter__(self) -> Any:
        return iter(self.states)

    def rows(self, tokens: int, least: int = 0) -> dict[str, int]:
        """Size of every growing dimension for `tokens` tokens, at least `least` each."""
        return {name: max(least, rows_after(rule, tokens, self.capacity_tokens)) for name, rule in self.growths.items()}

    @property
    def period(self) -> int:
        """Longest period of all growth rules, in tokens. Calls that cross its multiples are the interesting ones."""
        return max((int(rule["per"]) for rule in self.growths.values()), default=1)

    def unread(self, state: State, tokens: int) -> tuple[int, slice]:
        """Axis and rows of a state that nothing reads after `tokens` tokens: the rows after them and, in a ring, the rest of the current
        chunk."""
        if state.growth is not None and not state.growth["fixed"]:
            return int(state.growth["axis"]), slice(rows_after(state.growth, tokens, self.capacity_tokens), None)
        if not state.ring:
            return 0, slice(0)
        size = int(state.shape[2])
        place, half = tokens % size, size // 2
        return 2, slice(place, (place + half - 1) // half * half)

    @property
    def settled(self) -> int:
        """Length of a block, in tokens, within which states after a part of a call equal the states after all of it, except for unread
        rows. 1: a state changes with every token.

        Rows by position qualify, and all states of an op that folds a chunk into its state when the chunk leaves a window (`State.late`).
        """
        ops: dict[tuple[int, str], list[State]] = {}
        for state in self.states:
            if state.op:
                ops.setdefault((state.layer, state.op), []).append(state)
        chunks = [
            next((int(s.growth["per"]) for s in found if s.growth and s.late), 1)
            for found in ops.values()
            if not all(s.positions for s in found)
        ]
        return min(chunks, default=ANY)

    def shapes(self, batch: int, rows: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Shape of every state for `batch` rows and these sizes of growing dimensions."""
        sizes = {"batch": batch, **rows}
        return {s.name: tuple(d if isinstance(d, int) else sizes[d] for d in s.shape) for s in self.states}

    def size_bytes(self, batch: int, rows: Mapping[str, int]) -> int:
        """Total bytes of all states."""
        shapes = self.shapes(batch, rows)
        return sum(math.prod(shapes[s.name]) * ITEM_BYTES[s.dtype] for s in self.states)
