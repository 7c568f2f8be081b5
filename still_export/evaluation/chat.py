"""What a model writes in a chat: replies to questions about a text, and how a chat's answers end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from still_export.errors import ConfigError
from still_export.evaluation.questions import holds, repeated, unseen_prompt
from still_export.package.chat_format import chat_format

REPLY_TOKENS, CHAT_TOKENS = 40, 200
"""Tokens of a reply at most, to a question about a text and in a chat."""


def unseen(
    model: Any,
    tokenizer: Any,
    fillers: Sequence[np.ndarray],
    length: int,
    depths: int,
    samples: int,
    rng: np.random.Generator,
    at_once: int,
) -> list[float]:
    """Share of the replies that hold the answer, by depth, of facts in forms that no training row has.

    Args:
        fillers: Token ids of texts; a depth's samples take them in turn, so facts stand in source code where one is code.
        length: Tokens of a prompt. at_once: Prompts of a batch.

    Raises:
        ConfigError: The tokenizer has no chat template, or a length has no room.
    """
    chat = template(tokenizer)
    prompts = []
    for depth in range(depths):
        place = depth / max(1, depths - 1)
        for sample in range(samples):
            prompts.append(unseen_prompt(tokenizer, chat, fillers[sample % len(fillers)], length, place, rng))
    found: list[bool] = []
    for start in range(0, len(prompts), at_once):
        part = prompts[start : start + at_once]
        replies = greedy(model, tokenizer, [ids.tolist() for ids, _ in part], REPLY_TOKENS)
        for reply, (_, answer) in zip(replies, part, strict=True):
            found.append(holds(tokenizer.decode(reply, skip_special_tokens=True), answer))
    shares: list[float] = np.array(found).reshape(depths, samples).mean(1).tolist()
    return shares


def chat_ends(model: Any, tokenizer: Any, questions: Sequence[str]) -> dict[str, float]:
    """How greedy answers of at most CHAT_TOKENS tokens end: mean "tokens", share "ended", mean share of "repeated" 4-grams.

    Raises:
        ConfigError: The tokenizer has no chat template.
    """
    template(tokenizer)
    prompts = []
    for question in questions:
        turn = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    replies = greedy(model, tokenizer, prompts, CHAT_TOKENS)
    return {
        "tokens": sum(map(len, replies)) / len(replies),
        "ended": sum(len(reply) < CHAT_TOKENS for reply in replies) / len(replies),
        "repeated": sum(map(repeated, replies)) / len(replies),
    }


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
    chat = chat_format(tokenizer)
    if chat is None:
        raise ConfigError(
            "the tokenizer has no chat template, so a chat cannot be evaluated. Leave out --chat and the task unseen."
        )
    return chat
