"""How a chat's answers end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from still_export.errors import ConfigError
from still_export.texts.replies import greedy
from still_export.texts.turns import turn_pieces
from tools.questions.facts import repeated

CHAT_TOKENS = 200
"""Tokens of an answer at most."""


def chat_ends(model: Any, tokenizer: Any, questions: Sequence[str], tokens_at_once: int) -> dict[str, float]:
    """How greedy answers of at most CHAT_TOKENS tokens end: mean "tokens", share "ended", mean share of "repeated" 4-grams.

    Args:
        tokens_at_once: Of the prompts that are answered together.
    """
    prompts = []
    for question in questions:
        turn = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    at_once = max(1, tokens_at_once // max(map(len, prompts)))
    parts = [prompts[start : start + at_once] for start in range(0, len(prompts), at_once)]
    replies = [reply for part in parts for reply in greedy(model, tokenizer, part, CHAT_TOKENS)]
    return {
        "tokens": sum(map(len, replies)) / len(replies),
        "ended": sum(len(reply) < CHAT_TOKENS for reply in replies) / len(replies),
        "repeated": sum(map(repeated, replies)) / len(replies),
    }


def template(tokenizer: Any) -> dict[str, str]:
    """Pieces of the chat template.

    Raises:
        ConfigError: There is none.
    """
    chat = turn_pieces(tokenizer)
    if chat is None:
        raise ConfigError("the tokenizer has no chat template, and all questions are asked in a chat.")
    return chat
