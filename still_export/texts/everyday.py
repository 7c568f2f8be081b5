"""Everyday questions and instructions: what a user of any chat model asks first, and how an answer is judged."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from still_export.package.chat_format import chat_format
from still_export.package.refusals import RunError

REPLY_TOKENS = 48
"""Most tokens of a reply: enough for a sentence or a function of two lines."""


@dataclass(frozen=True)
class Question:
    """A question of the file everyday.jsonl.

    Args:
        kind: fact, sum (arithmetic), code or form (instructions on the form of the answer).
        ask: The user's message.
        right: Regular expression that a right reply contains, as whole words. whole: One that is the whole reply; one of both is given.
            Case is ignored.
    """

    kind: str
    ask: str
    right: str = ""
    whole: str = ""

    def judges(self, reply: str) -> bool:
        """Whether `reply` is right."""
        if self.whole:
            return re.fullmatch(self.whole, reply.strip(), re.IGNORECASE | re.DOTALL) is not None
        return re.search(rf"(?<!\w)(?:{self.right})(?!\w)", reply, re.IGNORECASE | re.DOTALL) is not None


@cache
def questions() -> tuple[Question, ...]:
    """All questions; each part of the list has all kinds in equal shares."""
    text = Path(__file__).with_name("everyday.jsonl").read_text(encoding="utf-8")
    return tuple(Question(**json.loads(line)) for line in text.splitlines())


def asked(question: str, tokenizer: Any) -> list[int]:
    """Token ids of a prompt: in a chat if the tokenizer has a template, else after the word "Question"."""
    chat = chat_format(tokenizer)
    if chat is not None:
        try:
            text = chat.render([{"role": "user", "content": question}])
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        except RunError:  # the template takes no such chat
            pass
    return list(tokenizer(f"Question: {question}\nAnswer:")["input_ids"])


def shortened(reply: str, tokenizer: Any) -> str:
    """The first answer of a reply: a model without a chat template goes on with questions of its own."""
    return reply if chat_format(tokenizer) is not None else reply.partition("\nQuestion:")[0]


@dataclass(frozen=True)
class Everyday:
    """Replies to everyday questions beside the base's.

    asked: Questions. base_right: Questions that the base answers rightly. kept: Those of them that the model answers rightly, too.
    right: All that the model answers rightly. same: Replies equal to the base's.
    """

    asked: int
    base_right: int
    kept: int
    right: int
    same: int

    @property
    def share(self) -> float | None:
        """Kept of what the base answers rightly; None: it answers nothing."""
        return self.kept / self.base_right if self.base_right else None

    def said(self) -> str:
        """The figures in words."""
        if not self.asked:
            return "everyday questions: none fits"
        return (
            f"everyday questions: keeps {self.kept} of the base's {self.base_right} right answers of {self.asked}, "
            f"{self.same} replies with the same text"
        )


def compared(asked: Sequence[Question], replies: Sequence[str], base: Sequence[str]) -> Everyday:
    """A model's replies beside its base's."""
    right, known = ([q.judges(reply) for q, reply in zip(asked, each, strict=True)] for each in (replies, base))
    return Everyday(
        len(asked),
        sum(known),
        sum(now and before for now, before in zip(right, known, strict=True)),
        sum(right),
        sum(one == other for one, other in zip(replies, base, strict=True)),
    )
