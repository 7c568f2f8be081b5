"""Retrieval tasks: a fact is hidden in a long filler text and asked for later. For evaluation, and as training data."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import numpy as np

from still_export.errors import ConfigError

VALUE_DIGITS = 6
_COLOURS = "amber azure black bronze brown copper coral cream crimson golden green grey ivory olive orange pink purple red silver white"
_THINGS = (
    "anchor apple arrow badger barrel basket beacon bell bottle bridge candle castle clock cloud falcon feather forest garden hammer "
    "harbor island kettle ladder lantern lemon lion mirror mountain needle orchard otter pencil piano pocket rabbit river saddle "
    "shadow spider stone table temple thunder tiger tower tunnel valley violin wagon whale window winter"
)
COLOURS, THINGS = _COLOURS.split(), _THINGS.split()


@dataclass(frozen=True)
class Task:
    """One form of single-fact retrieval.

    Args:
        fact, question: Text before the value, with {key} where the fact has one.
        filler: A sentence that is repeated as filler; None = ordinary text.
        distractors: Facts of the same form with other keys and values beside the one that is asked for.
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


def task_named(name: str) -> Task:
    """The task `name`.

    Raises:
        ConfigError: Unknown, with the known ones.
    """
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, 1)
        raise ConfigError(
            f"the task {name!r} is unknown; known: {', '.join(TASKS)}."
            + (f" Did you mean {near[0]!r}?" if near else "")
        )
    return TASKS[name]


class TaskWriter:
    """Writes tasks as token ids of exact length, every piece tokenized for itself.

    Args:
        tokenizer: Of the model.
        text: Token ids of ordinary text for the filler, [N].
    """

    def __init__(self, tokenizer: Any, text: np.ndarray) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._start = tokenizer("")["input_ids"]  # what the tokenizer puts before every text
        self._known: dict[str, list[int]] = {}

    def prompt(self, task: Task, length: int, depth: float, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """A prompt with its answer, [length], and the number of its last tokens that are the answer.

        Args:
            depth: Where the fact stands, 0 = at the beginning, 1 = right before the question.

        Raises:
            ConfigError: The task does not fit into `length`.
        """
        keys = self._keys(1 + task.distractors, rng)
        values = [self._value(rng) for _ in keys]
        tail = self._ids(".")
        facts = [
            (
                float(rng.random()) if i else depth,
                _piece((self._ids(task.fact.format(key=key)), 1), (value, 1), (tail, 1)),
            )
            for i, (key, value) in enumerate(zip(keys, values, strict=True))
        ]
        end = _piece((self._ids(task.question.format(key=keys[0])), 1), (values[0], 1))
        return self._compose(task, length, facts, end, rng)[0].astype(np.int64), len(values[0])

    def training_row(
        self, task: Task, length: int, rng: np.random.Generator, answer_weight: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """A row with several facts, each asked for at some later place; ids [length] and loss weights [length].

        Values cannot be predicted where they first appear and weigh nothing there; answers weigh `answer_weight`, the rest 1.
        """
        pairs = 1 if task.filler else int(rng.integers(1, 9))
        pairs = max(1, min(pairs, length // 128))
        pieces = []
        tail = self._ids(".")
        for key in self._keys(pairs, rng):
            value = self._value(rng)
            fact, ask = self._ids(task.fact.format(key=key)), self._ids(task.question.format(key=key))
            place = float(rng.random())
            pieces.append((place, _piece((fact, 1), (value, 0), (tail, 1))))
            pieces.append(
                (place + (1 - place) * float(rng.random()), _piece((ask, 1), (value, answer_weight), (tail, 1)))
            )
        row = self._compose(task, length, pieces, _piece(), rng)
        return row[0].astype(np.int64), row[1].astype(np.float32)

    def _compose(
        self, task: Task, length: int, pieces: list[tuple[float, np.ndarray]], end: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Filler of the right length with `pieces` at their depths and `end` behind; ids and weights, [2, length]."""
        room = length - len(self._start) - end.shape[1] - sum(piece.shape[1] for _, piece in pieces)
        filler = self._filler(task, room, rng)
        parts, cut = [_piece((self._start, 1))], 0
        for depth, piece in sorted(pieces, key=lambda p: p[0]):
            upto = int(depth * room)
            parts += [_piece((filler[cut:upto], 1)), piece]
            cut = upto
        return np.concatenate([*parts, _piece((filler[cut:], 1)), end], axis=1)

    def _filler(self, task: Task, room: int, rng: np.random.Generator) -> np.ndarray:
        if room < 0:
            raise ConfigError(f"a retrieval task does not fit: {-room} tokens too many. Use a greater length.")
        if task.filler is not None:
            sentence = self._ids(task.filler)
            return np.resize(np.asarray(sentence, np.int64), room)
        if len(self._text) < room:
            return np.resize(self._text, room)
        start = int(rng.integers(0, len(self._text) - room + 1))
        return self._text[start : start + room]

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


def _piece(*parts: tuple[Any, float]) -> np.ndarray:
    """Token ids and their loss weights, [2, n], of parts with one weight each."""
    ids = np.concatenate([np.zeros(0), *(np.asarray(ids, np.float64) for ids, _ in parts)])
    weights = np.concatenate([np.zeros(0), *(np.full(len(ids), weight) for ids, weight in parts)])
    return np.stack([ids, weights])
