"""A model's replies to everyday questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from still_export.texts.everyday import REPLY_TOKENS, Question, asked, questions, shortened
from still_export.texts.replies import replies

AT_ONCE = 32
"""Questions of a batch."""


def fitting(tokenizer: Any, room: int, most: int | None = None) -> list[Question]:
    """The first `most` questions (None: all) whose prompts leave room for a reply in `room` tokens."""
    chosen = questions()[:most]
    return [question for question in chosen if len(asked(question.ask, tokenizer)) + REPLY_TOKENS <= room]


def everyday_replies(model: Any, tokenizer: Any, wanted: Sequence[Question]) -> list[str]:
    """Greedy replies of `model`: a transformers model with a cache, a package or a server."""
    prompts = [asked(question.ask, tokenizer) for question in wanted]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # little padding
    found = [""] * len(prompts)
    for start in range(0, len(order), AT_ONCE):
        part = order[start : start + AT_ONCE]
        written = replies(model, tokenizer, [prompts[i] for i in part], REPLY_TOKENS)
        for i, reply in zip(part, written, strict=True):
            found[i] = shortened(reply, tokenizer)
    return found
