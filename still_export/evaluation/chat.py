"""What a model writes: replies to prompts, and how a chat's answers end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from still_export.errors import ConfigError
from still_export.evaluation.questions import repeated
from still_export.texts.turns import turn_pieces

CHAT_TOKENS = 200
"""Tokens of an answer at most."""


def chat_ends(model: Any, tokenizer: Any, questions: Sequence[str], tokens_at_once: int) -> dict[str, float]:
    """How greedy answers of at most CHAT_TOKENS tokens end: mean "tokens", share "ended", mean share of "repeated" 4-grams.

    Args:
        tokens_at_once: Of the prompts that are answered together.

    Raises:
        ConfigError: The tokenizer has no chat template.
    """
    template(tokenizer)
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


def replies(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[str]:
    """The most likely continuations of at most `tokens` tokens, as texts; a served model writes them itself."""
    if hasattr(model, "complete_all"):
        written: list[str] = model.complete_all([(prompt, tokens) for prompt in prompts])
        return written
    said = greedy(model, tokenizer, prompts, tokens)
    return [tokenizer.decode(reply, skip_special_tokens=True) for reply in said]


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """The most likely continuation of every prompt up to its end, without the end's token, of at most `tokens` tokens."""
    longest, end = max(map(len, prompts)), tokenizer.eos_token_id
    ids = torch.full((len(prompts), longest), end, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        mask[row, : len(prompt)] = 1
    written = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=end,
    )
    rows = [row.tolist() for row in written[:, longest:].cpu()]
    return [row[: row.index(end)] if end in row else row for row in rows]


def template(tokenizer: Any) -> dict[str, str]:
    """Pieces of the chat template.

    Raises:
        ConfigError: There is none.
    """
    chat = turn_pieces(tokenizer)
    if chat is None:
        raise ConfigError(
            "the tokenizer has no chat template, so a chat cannot be evaluated. Leave out --chat and the tasks unseen and code."
        )
    return chat
