"""Rows of a state after a number of tokens, and the shapes and bytes that follow. Stdlib only.

The one place in Python that computes with a growth rule (`still_graphs.spec.Growth.resolve`); exports copy this file into packages.
C++ does it in plugins/runner/states.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}
"""Bytes of one element by dtype name."""
NEXT_TOKEN = "next_token"
"""Output with the likeliest token, int32, one for each row of logits."""

LAST_HIDDEN = "last_hidden"
"""Output for MTP heads: hidden states after the last norm, float32."""
AHEAD = "mtp_"
"""Prefix of a head's inputs, outputs and states."""
EMBEDDINGS, POSITIONS = GIVEN = ("inputs_embeds", "position_ids")
"""Inputs, with defaults, of the graphs of models that see images. Embeddings [B, T, C] stand where a token's id is -1; positions int64
[3, B, T] in time, height and width, -1: as tokens are counted. Dimensions of 1 are repeated."""

ANY = 1 << 62
"""More tokens than any call has."""

REPLAY = "replay_"
"""Prefix of outputs for speculation: the inputs from which ops computed states."""


def rows_after(rule: Mapping[str, Any], tokens: int, capacity_tokens: int) -> int:
    """Rows that a state has after `tokens` tokens, by its resolved growth rule.

    Args:
        rule: rows, per, lag, and `fixed`: the state has the rows of the whole capacity from the first token on.
        tokens: Tokens of the longest row of the batch.
        capacity_tokens: What the state is meant to hold.
    """
    counted = capacity_tokens if rule["fixed"] else tokens
    return int(rule["rows"]) * max(0, -(-counted // int(rule["per"])) - int(rule["lag"]))


@dataclass(frozen=True)
class State:
    """One state of one layer, an entry of the manifest's state table.

    Args:
        name: `<state>.<layer>`; the graph has `past_<name>` and `present_<name>`.
        op: That has it; empty: the runner alone has, between calls.
        shape: "batch" first; the name of a growing dimension where the growth rule's axis is; numbers elsewhere.
        dtype: Element type by name.
        in_place: Past and present may be one buffer.
        growth: Resolved growth rule, None where the size is fixed.
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
        """Whether it has a row for each position, overwritten by another token there."""
        return self.growth is not None and (self.growth["rows"], self.growth["per"], self.growth["lag"]) == (1, 1, 0)

    @property
    def late(self) -> bool:
        """Whether a chunk's rows are added when a later chunk begins."""
        return self.growth is not None and bool(self.growth["lag"])

    @property
    def apart(self) -> bool:
        """Whether rejected tokens leave something in it that is read later."""
        return not self.positions and not (self.late and self.growth is not None and not self.growth["fixed"])

    @property
    def ring(self) -> bool:
        """Whether its axis 2 is a ring of two chunks: a new chunk overwrites the older one."""
        return self.name.startswith("window_")

    def to_dict(self) -> dict[str, Any]:
        """The manifest's entry."""
        return {**vars(self), "shape": list(self.shape), "growth": None if self.growth is None else dict(self.growth)}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> State:
        """The state of a manifest's entry; raises KeyError or TypeError for another form."""
        return cls(**{**entry, "shape": tuple(entry["shape"])})


class StateTable:
    """The states of a package.

    Args:
        states: In the graph's order.
        capacity_tokens: What the package is meant to hold.
        bounded: More tokens than that are refused; otherwise states fold or grow beyond it.

    Raises:
        ValueError: Two states grow by different rules under one name.
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
        """Longest period of all growth rules; states change when a call crosses a multiple of it."""
        return max((int(rule["per"]) for rule in self.growths.values()), default=1)

    def unread(self, state: State, tokens: int) -> tuple[int, slice]:
        """Axis and rows of a state that nothing reads after `tokens` tokens, including those of the new chunk in a ring."""
        if state.growth is not None and not state.growth["fixed"]:
            return int(state.growth["axis"]), slice(rows_after(state.growth, tokens, self.capacity_tokens), None)
        if not state.ring:
            return 0, slice(0)
        held = int(state.shape[2])
        place, half = tokens % held, held // 2
        return 2, slice(place, (place + half - 1) // half * half)

    @property
    def settled(self) -> int:
        """Chunk size within which states after some of a call's tokens equal those after all, except unread rows; 1: every token changes a
        state.

        Such are rows of positions, and all states of an op that takes a chunk into its state when it leaves a window (`State.late`).
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
        """Shape of every state for `batch` rows and the given sizes of growing dimensions."""
        sizes = {"batch": batch, **rows}
        return {s.name: tuple(d if isinstance(d, int) else sizes[d] for d in s.shape) for s in self.states}

    def size_bytes(self, batch: int, rows: Mapping[str, int]) -> int:
        """Bytes of all states together."""
        shapes = self.shapes(batch, rows)
        return sum(math.prod(shapes[s.name]) * ITEM_BYTES[s.dtype] for s in self.states)
