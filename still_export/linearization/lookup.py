"""Which heads look facts up: their attention from an answer's positions to the fact that holds it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from still_export.mixers.trainable import SOFTMAX, Trainable, attention_mode
from still_export.texts.tasks import TaskWriter, task_named

PROMPTS = 4


def lookup_scores(model: Any, attentions: list[Trainable], writer: TaskWriter, tokens: int, seed: int = 0) -> Tensor:
    """Share of every head's attention that goes from the query that predicts a token of an answer to that token in the fact.

    Args:
        model: A STILL model; its softmax attention is looked at.
        writer: Of the needle prompts, PROMPTS of them, each of `tokens` tokens with its fact in another place.

    Returns:
        [layers, H], means over tokens and prompts.

    Source: retrieval heads, arXiv:2404.15574.
    """
    rng = np.random.default_rng(seed)
    scores = []
    for number in range(PROMPTS):
        prompt, count = writer.prompt(task_named("needle"), tokens, (number + 0.5) / PROMPTS, rng)
        scores.append(attention_to_fact(model, attentions, prompt, count))
    return torch.stack(scores).mean(0)


@torch.no_grad()
def attention_to_fact(model: Any, attentions: list[Trainable], prompt: np.ndarray, count: int) -> Tensor:
    """`lookup_scores` of one prompt, ids [T], whose last `count` tokens are an answer that stood in it before: [layers, H]."""
    tokens = len(prompt)
    windows = np.lib.stride_tricks.sliding_window_view(prompt, count)
    fact = int((windows == prompt[-count:]).all(1).argmax())  # the first place
    asked = torch.arange(tokens - count - 1, tokens - 1, device=model.device)
    future = torch.arange(tokens, device=model.device) > asked[:, None]
    seen: list[Tensor] = []

    def look(module: Any, arguments: Any, given: dict[str, Any]) -> None:
        hidden = given["hidden_states"] if "hidden_states" in given else arguments[0]
        query, key, _ = module.project_heads(hidden, given.get("position_embeddings"))
        keys = key[0].repeat_interleave(query.shape[2] // key.shape[2], dim=1).float()
        logits = torch.einsum("qhd,khd->hqk", query[0, asked].float(), keys) * module.head_dim**-0.5
        weight = logits.masked_fill(future, -torch.inf).softmax(-1)
        seen.append(weight[:, range(count), range(fact, fact + count)].mean(1).cpu())

    hooks = [attention.register_forward_pre_hook(look, with_kwargs=True) for attention in attentions]
    try:
        with attention_mode(attentions, SOFTMAX):
            model(torch.from_numpy(prompt)[None].to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(seen)
