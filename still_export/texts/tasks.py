"""Retrieval tasks: a fact in a long filler text, and a question about it later. For evaluation and training."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from still_export.errors import ConfigError, unknown

VALUE_DIGITS = 6
ANSWER = -1.0
"""Placeholder weight of answer tokens until `Weighing` knows the number of answers in the row."""
FEW_ANSWERS = 4
"""Fewer answers are weighted like so many. One answer with the weight of a row's would dominate the gradient of a step."""
DATA: dict[str, Any] = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
"""Names, things and relations for rows."""
COLOURS, THINGS = DATA["key_colours"].split(), DATA["key_things"].split()


@dataclass(frozen=True)
class Task:
    """One form of retrieving a single fact.

    Args:
        fact, question: Text before the value, with {key} if the fact has a key.
        filler: Sentence that is repeated as filler; None: ordinary text.
        distractors: Number of further facts of the same form, with other keys and values.
    """

    fact: str
    question: str
    filler: str | None = None
    distractors: int = 0


TASKS: dict[str, Task] = {
    "needle": Task(
        " The secret number of the {key} is",
        "\nWhat is the secret number of the {key}? The secret number of the {key} is",
    ),
    "passkey": Task(
        " The pass key is",
        "\nWhat is the pass key? The pass key is",
        filler=" The rain falls on the hills and the river runs down to the sea.",
    ),
    "key_value": Task("\n{key}:", "\nLook it up again.\n{key}:", distractors=3),
}


def task_named(name: str, others: Iterable[str] = ()) -> Task:
    """The task `name`; `others` are further known names, for the error.

    Raises:
        ConfigError: The name is unknown; the message lists the known ones.
    """
    if name not in TASKS:
        raise unknown(name, (*TASKS, *others), f"the task {name!r}")
    return TASKS[name]


@dataclass(frozen=True)
class Weighing:
    """Loss weights of a row's answers; other tokens weigh 1, or 0 if they cannot be predicted.

    Args:
        weight: Weight of each token of an answer if `share` is 0.
        share: Weight of all answers of a row relative to its tokens, equal for all answers. Long rows then weigh their answers per token
            like short ones. Fewer than FEW_ANSWERS weigh as if there were so many.
    """

    weight: float = 10.0
    share: float = 0.0

    def weights(self, marked: np.ndarray) -> np.ndarray:
        """Loss weights float32 [n] from `marked` [n], which marks answers with runs of ANSWER."""
        weights = marked.astype(np.float32)
        answers = marked == ANSWER
        weights[answers] = self.weight
        if self.share and answers.any():
            first = answers & ~np.concatenate([[False], answers[:-1]])
            number = np.cumsum(first)[answers] - 1
            size = np.bincount(number)
            # Above 1, which distinguishes answers from other tokens.
            weights[answers] = np.maximum(self.share * len(marked) / max(FEW_ANSWERS, len(size)) / size[number], 1.01)
        return weights


class TaskWriter:
    """Writes tasks as token ids of exact length. Each piece is tokenized separately.

    Args:
        text: Token ids of ordinary text for the filler, [N].
    """

    def __init__(self, tokenizer: Any, text: np.ndarray) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._start = tokenizer("")["input_ids"]  # the tokenizer's prefix of every text
        self._known: dict[str, list[int]] = {}

    def prompt(self, task: Task, length: int, depth: float, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """A prompt with its answer. Returns (ids [length], number of the last tokens that are the answer).

        Args:
            depth: Place of the fact, 0 = beginning, 1 = right before the question.

        Raises:
            ConfigError: The task does not fit into `length`.
        """
        keys = self._keys(1 + task.distractors, rng)
        values = [self._value(rng) for _ in keys]
        tail = self._ids(".")
        facts = [
            (
                float(rng.random()) if i else depth,
                piece((self._ids(task.fact.format(key=key)), 1), (value, 1), (tail, 1)),
            )
            for i, (key, value) in enumerate(zip(keys, values, strict=True))
        ]
        end = piece((self._ids(task.question.format(key=keys[0])), 1), (values[0], 1))
        return self._compose(task, length, facts, end, rng)[0].astype(np.int64), len(values[0])

    def training_row(
        self, task: Task, length: int, rng: np.random.Generator, weighing: Weighing
    ) -> tuple[np.ndarray, np.ndarray]:
        """A row with several facts, each with a question at a later place. Returns (ids [length], loss weights [length]).

        Values weigh 0 at their first place, where they cannot be predicted. Answers are weighted by `weighing`, other tokens by 1.
        """
        longest = 8 if weighing.share == 0 else max(8, length // 256)
        pairs = 1 if task.filler else int(rng.integers(1, longest + 1))
        pairs = max(1, min(pairs, length // 128))
        pieces = []
        tail = self._ids(".")
        for key in self._keys(pairs, rng):
            value = self._value(rng)
            fact, ask = self._ids(task.fact.format(key=key)), self._ids(task.question.format(key=key))
            place, later = places(length, rng, near=weighing.share > 0)
            pieces.append((place, piece((fact, 1), (value, 0), (tail, 1))))
            pieces.append((later, piece((ask, 1), (value, ANSWER), (tail, 1))))
        row = self._compose(task, length, pieces, piece(), rng)
        return row[0].astype(np.int64), weighing.weights(row[1])

    def _compose(
        self, task: Task, length: int, pieces: list[tuple[float, np.ndarray]], end: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Filler of the right length with `pieces` at their depths and `end` last; ids and weights [2, length]."""
        room = room_for_filler(length, [*(p for _, p in pieces), end], self._start)
        if task.filler is not None:
            filler = np.resize(np.asarray(self._ids(task.filler), np.int64), room)
        else:
            filler = stretch(self._text, room, rng)
        return hide(piece((self._start, 1)), filler, pieces, end)

    def _keys(self, count: int, rng: np.random.Generator) -> list[str]:
        chosen = rng.choice(len(COLOURS) * len(THINGS), size=count, replace=False)
        return [f"{COLOURS[i % len(COLOURS)]} {THINGS[i // len(COLOURS)]}" for i in chosen]

    def _value(self, rng: np.random.Generator) -> list[int]:
        low = 10 ** (VALUE_DIGITS - 1)
        return self._encode(f" {rng.integers(low, 10 * low)}")

    def _ids(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self._encode(text)
        return self._known[text]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def piece(*parts: tuple[Any, float]) -> np.ndarray:
    """Ids and loss weights [2, n] of parts (ids, weight)."""
    ids = np.concatenate([np.zeros(0), *(np.asarray(ids, np.float64) for ids, _ in parts)])
    weights = np.concatenate([np.zeros(0), *(np.full(len(ids), weight) for ids, weight in parts)])
    return np.stack([ids, weights])


def room_for_filler(length: int, pieces: list[np.ndarray], start: list[int]) -> int:
    """Tokens of `length` that `pieces` and `start` leave.

    Raises:
        ConfigError: They do not fit.
    """
    room = length - len(start) - sum(p.shape[1] for p in pieces)
    if room < 0:
        raise ConfigError(f"a retrieval task does not fit: {-room} tokens too many. Use a greater length.")
    return room


def stretch(text: np.ndarray, room: int, rng: np.random.Generator) -> np.ndarray:
    """`room` tokens of `text` from a random place; a shorter text is repeated."""
    if len(text) < room:
        return np.resize(text, room)
    start = int(rng.integers(0, len(text) - room + 1))
    return text[start : start + room]


def hide(start: np.ndarray, filler: np.ndarray, pieces: list[tuple[float, np.ndarray]], end: np.ndarray) -> np.ndarray:
    """`filler` with `pieces` at their depths, between `start` and `end`; ids and weights [2, n]."""
    parts, cut = [start], 0
    for depth, hidden in sorted(pieces, key=lambda p: p[0]):
        upto = int(depth * len(filler))
        parts += [piece((filler[cut:upto], 1)), hidden]
        cut = upto
    return np.concatenate([*parts, piece((filler[cut:], 1)), end], axis=1)


def places(length: int, rng: np.random.Generator, near: bool) -> tuple[float, float]:
    """Depths of a fact and its question in a row of `length` tokens.

    Args:
        near: Place questions as evaluation does: a third at distances with equal probability per octave, so that some follow their fact
            directly, and a third near the row's end. Uniform places are rarely nearer than a window or farther than half a row.
    """
    place = float(rng.random())
    kind = rng.random() if near else 1.0
    if kind < 1 / 3:
        return place, min(1.0, place + float(length ** (rng.random() - 1)))
    if kind < 2 / 3:
        later = 1 - float(rng.random()) / 10
        return place * later, later
    return place, place + (1 - place) * float(rng.random())
