"""How many rows a state has after how many tokens, and what that means in shapes and bytes. Stdlib only.

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
"""Output of the graphs that say which token is the likeliest, int32, one for each row of logits."""

LAST_HIDDEN = "last_hidden"
"""Output of graphs for heads that guess tokens ahead: what is behind the last norm, float32."""
AHEAD = "mtp_"
"""Begin of the names of all that a head has: its inputs, outputs and states."""
EMBEDDINGS, POSITIONS = GIVEN = ("inputs_embeds", "position_ids")
"""Inputs, with defaults, of the graphs of models that see images. Embeddings [B, T, C] stand where a token's id is -1; positions int64
[3, B, T] in time, height and width, -1: as tokens are counted. Dimensions of 1 are repeated."""

ANY = 1 << 62
"""More tokens than any call has."""

REPLAY = "replay_"
"""Begin of the names of outputs that graphs give for speculation: what their ops computed states from."""


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
    """One state of one layer, as the manifest's state table has it.

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
        """It has a row for each position, which is written again where another token takes it."""
        return self.growth is not None and (self.growth["rows"], self.growth["per"], self.growth["lag"]) == (1, 1, 0)

    @property
    def late(self) -> bool:
        """It gets the rows of a chunk when a later one begins."""
        return self.growth is not None and bool(self.growth["lag"])

    @property
    def apart(self) -> bool:
        """Tokens that are read and then do not hold leave something in it that is read later."""
        return not self.positions and not (self.late and self.growth is not None and not self.growth["fixed"])

    @property
    def ring(self) -> bool:
        """Its axis 2 holds two chunks, of which the one that begins takes the rows of the one that left."""
        return self.name.startswith("window_")

    def to_dict(self) -> dict[str, Any]:
        """The manifest's entry."""
        return {**vars(self), "shape": list(self.shape), "growth": None if self.growth is None else dict(self.growth)}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> State:
        """The state that a manifest's entry describes; KeyError, TypeError where it has no such form."""
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
        """The table of a package's manifest."""
        capacity = manifest["capacity"]
        states = (State.from_dict(entry) for entry in manifest["states"])
        return cls(states, int(capacity["capacity_tokens"]), bool(capacity["bounded"]))

    def __iter__(self) -> Any:
        return iter(self.states)

    def rows(self, tokens: int, least: int = 0) -> dict[str, int]:
        """Size of every growing dimension with room for `tokens` tokens, at least `least` each."""
        return {name: max(least, rows_after(rule, tokens, self.capacity_tokens)) for name, rule in self.growths.items()}

    @property
    def period(self) -> int:
        """Tokens after which a state grows: the longest of all rules; calls that cross its multiples are the interesting ones."""
        return max((int(rule["per"]) for rule in self.growths.values()), default=1)

    def unread(self, state: State, tokens: int) -> tuple[int, slice]:
        """Axis and rows of a state that nothing reads after `tokens` tokens: those behind them, also of the chunk that begins in a ring."""
        if state.growth is not None and not state.growth["fixed"]:
            return int(state.growth["axis"]), slice(rows_after(state.growth, tokens, self.capacity_tokens), None)
        if not state.ring:
            return 0, slice(0)
        held = int(state.shape[2])
        place, half = tokens % held, held // 2
        return 2, slice(place, (place + half - 1) // half * half)

    @property
    def settled(self) -> int:
        """Tokens of the chunks within which states after some of a call's tokens are those after all of them, but for rows that nothing
        reads; 1: a state changes with every token.

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
        """Shape of every state for `batch` rows of the batch and the given sizes of growing dimensions."""
        sizes = {"batch": batch, **rows}
        return {s.name: tuple(d if isinstance(d, int) else sizes[d] for d in s.shape) for s in self.states}

    def size_bytes(self, batch: int, rows: Mapping[str, int]) -> int:
        """Bytes of all states together."""
        shapes = self.shapes(batch, rows)
        return sum(math.prod(shapes[s.name]) * ITEM_BYTES[s.dtype] for s in self.states)
