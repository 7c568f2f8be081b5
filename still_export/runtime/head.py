"""A head that guesses tokens ahead (MTP) of a package's model, in ONNX Runtime.

For every token but the first, the head reads the token and the model's hidden vector of the token before. Its keys and values, and the last
hidden vector, are further states of the package.

Exports copy this file into packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from still_export.runtime.base import Runner
from still_export.runtime.sampling import NO_TOKEN, RunError, likeliest
from still_export.runtime.speculation import Guessed
from still_graphs.states import AHEAD

WAITING = 128
"""Most tokens of a sequence that wait."""


class Head:
    """Reads what the model reads, and guesses the tokens after it. Guesses leave no trace in its state.

    Tokens wait until a guess is needed or WAITING is reached, because one call of many tokens is faster.

    Args:
        model: The model's runner, an `OrtModel`, which imports this file.
        session: Of the head's graph.
    """

    def __init__(self, model: Any, session: Any) -> None:
        self.model, self.session = model, session
        self._state = next(state for state in model.table if not state.op)
        self._waiting: list[list[tuple[np.ndarray, np.ndarray]]] = []
        # Sequence, its length, hidden vector of its last token.
        self._going: tuple[int, int, np.ndarray] = (0, 0, np.zeros(0))

    def clear(self) -> None:
        """Drop waiting tokens of all sequences."""
        self._waiting = [[] for _ in range(self.model.batch)]

    def drop(self, sequence: int) -> None:
        """Drop waiting tokens of one sequence."""
        self._waiting[sequence] = []

    def add(self, first: int, tokens: np.ndarray, counts: np.ndarray, hidden: np.ndarray) -> None:
        """Add tokens that R sequences from `first` on have read.

        Args:
            tokens: [R, T].
            counts: Number of tokens that each has read, [R].
            hidden: The model's hidden vectors of `tokens`, [R, T, C].
        """
        for row, count in enumerate(counts):
            if count:
                self._waiting[first + row].append((tokens[row, :count].copy(), hidden[row, :count].copy()))
        if max(sum(len(ids) for ids, _ in each) for each in self._waiting) >= WAITING:
            self.catch_up()

    def catch_up(self) -> None:
        """Read all waiting tokens."""
        if any(self._waiting):
            self._read(0, range(self.model.batch))

    def begin(self, sequence: int, token: int) -> np.ndarray:
        """Logits [V] after `token`, the one after all that the sequence has read."""
        return self._read(sequence, [sequence], [token])

    def go_on(self, token: int) -> np.ndarray:
        """Logits [V] after `token`, the one after the last guess."""
        sequence, length, hidden = self._going
        self.model.reserve(np.array([length - self.model.length[sequence]]), sequence)
        return self._call(sequence, np.array([[token]]), np.array([1]), np.array([length - 1]), hidden)

    def _read(self, first: int, sequences: Sequence[int], further: Sequence[int] = ()) -> np.ndarray:
        """Read the waiting tokens of `sequences`, then `further` tokens, which the model has not read."""
        model = self.model
        value = model.states.past[self._state.name]
        made = model.values.array(value)  # hidden vectors of each sequence's last token
        rows = []
        for sequence in sequences:
            waiting = self._waiting[sequence]
            before = int(model.length[sequence]) - sum(len(ids) for ids, _ in waiting)
            ids = np.concatenate([*(ids for ids, _ in waiting), np.array(further, np.int64)]).astype(np.int64)
            hidden = np.concatenate([made[sequence : sequence + 1][: before > 0], *(each for _, each in waiting)])
            ids = ids[before == 0 :]  # the first token has no hidden vector before it
            rows.append((ids, hidden[: len(ids)], max(before - 1, 0)))
            made[sequence] = hidden[-1] if len(hidden) else 0
            self._waiting[sequence] = []
        if model.device != "cpu":  # a copy; else the state's own memory
            value.update_inplace(model.values.tensor(made, self._state.dtype))
        counts = np.array([len(ids) for ids, _, _ in rows])
        if not counts.any():
            return np.zeros(0)
        tokens = np.zeros((len(rows), counts.max()), np.int64)
        padded = np.zeros((*tokens.shape, made.shape[1]), made.dtype)
        for row, (ids, hidden, _) in enumerate(rows):
            tokens[row, : len(ids)], padded[row, : len(ids)] = ids, hidden
        return self._call(first, tokens, counts, np.array([past for _, _, past in rows]), padded)

    def _call(
        self, first: int, tokens: np.ndarray, counts: np.ndarray, past: np.ndarray, hidden: np.ndarray
    ) -> np.ndarray:
        """Logits [V] of the first sequence's last token."""
        binding, inputs = self.model.bindings.of(first, len(tokens), tokens.shape[1], AHEAD)
        arrays = {"input_ids": tokens, "new_tokens": counts, "past_length": past, "hidden": hidden}
        for name, array in arrays.items():
            kind = hidden.dtype if array is hidden else np.int64
            inputs[AHEAD + name].update_inplace(np.ascontiguousarray(array, kind))
        self.model.run_apart(self.session, binding)
        logits, made = (value.numpy() for value in binding.get_outputs()[:2])
        self._going = first, int(past[0] + counts[0]) + 1, made[:1].copy()
        return np.array(logits[0, -1])


class Ahead(Guessed):
    """The head's guesses for one sequence.

    Args:
        head: Of the runner that reads the sequence.
        tokens: So far; the model has read all but the last.
        sequence: Index in the batch.
    """

    def __init__(self, head: Head, tokens: Sequence[int], sequence: int) -> None:
        super().__init__(tokens)
        self.head, self.sequence = head, sequence

    def guess(self, most: int) -> list[int]:
        self.guesses = []
        logits = self.head.begin(self.sequence, self.tokens[-1])
        while (token := int(likeliest(logits))) != NO_TOKEN:
            self.guesses.append(token)
            if len(self.guesses) == most:
                break
            logits = self.head.go_on(token)
        return self.guesses


def demand_head(model: Runner) -> None:
    """Raise RunError if `model` has no head."""
    if model.head is None:
        raise RunError(
            f"{model.folder} has no head that guesses tokens ahead (MTP): export with --speculate a model that was published with one "
            "(Qwen3.5, Qwen3-Next, Nemotron-H, Ling), and run it with ONNX Runtime."
        )
