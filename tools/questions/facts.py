"""Questions for measuring alone: facts in forms that no training row has, asked in a chat, and a chat's questions without a text.

Nothing here may be used to train, or to choose a recipe: relations, words and what stands around a fact differ from those of
`still_export.texts.forms`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from still_export.evaluation.synthetic import Item

_DATA: dict[str, Any] = json.loads(Path(__file__).with_name("questions.json").read_text(encoding="utf-8"))
WORDS: dict[str, str] = _DATA["words"]
FACTS: list[list[str]] = _DATA["facts"]
"""Sentence, question, and which of its words is the answer."""
AROUND: list[str] = _DATA["around"]
ABOUT_TEXT: list[str] = _DATA["about_text"]
CHAT: list[str] = _DATA["chat"]
LONGEST_QUESTION = 64
"""Tokens of one of them with what a chat puts around."""


def unseen_fact(rng: np.random.Generator) -> tuple[str, str, str]:
    """What is hidden, with what stands around it; the question; the answer that a reply must hold."""
    sentence, question, kind = FACTS[int(rng.integers(len(FACTS)))]
    values = {name: str(rng.choice(words.split())) for name, words in WORDS.items()}
    values |= {
        "n": str(rng.integers(11, 990)),
        "who2": str(rng.choice([w for w in WORDS["who"].split() if w != values["who"]])),
    }
    around = AROUND[int(rng.integers(len(AROUND)))]
    return around.format(sentence.format(**values)), question.format(**values), values[kind]


def about_texts(tokenizer: Any, tokens: np.ndarray, length: int, count: int) -> list[str]:
    """`count` questions, each behind another part of a text of `tokens`; part and question have about `length` tokens together."""
    part = length - LONGEST_QUESTION
    starts = np.linspace(0, len(tokens) - part, count).astype(int)
    return [
        f"{tokenizer.decode(tokens[start : start + part].tolist())}\n\n{ABOUT_TEXT[row % len(ABOUT_TEXT)]}"
        for row, start in enumerate(starts)
    ]


def unseen(rng: np.random.Generator, depth: float, words: Sequence[str]) -> Item:
    """An item of `still_export.evaluation.synthetic`."""
    fact, question, answer = unseen_fact(rng)
    return Item(f"\n\n{question}", (answer,), ((depth, fact),), chance=True)


def repeated(tokens: Sequence[int], size: int = 4) -> float:
    """Share of the n-grams of `tokens` that occurred before."""
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
