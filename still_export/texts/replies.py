"""Greedy replies of a model to prompts, and to everyday questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from still_export.texts.everyday import REPLY_TOKENS, Question, asked, questions, shortened

AT_ONCE = 32
"""Questions of a batch."""


def replies(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[str]:
    """Greedy continuations of at most `tokens` tokens, as texts; a served model generates them itself."""
    if hasattr(model, "complete_all"):
        written: list[str] = model.complete_all([(prompt, tokens) for prompt in prompts])
        return written
    generated = greedy(model, tokenizer, prompts, tokens)
    return [tokenizer.decode(reply, skip_special_tokens=True) for reply in generated]


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Greedy continuations of at most `tokens` tokens, without the end token."""
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
