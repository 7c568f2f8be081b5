"""Each layer's need of softmax, measured before any training: for predicting text, and for looking facts up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from still_export.linearization.harms import damages
from still_export.linearization.recipe import ROW_TOKENS
from still_export.mixers.trainable import SOFTMAX, Trainable, attention_mode
from still_export.texts.tasks import TaskWriter, task_named
from still_export.texts.texts import held_out_rows

if TYPE_CHECKING:
    from still_export.linearization.run import LinearizationRun

PROMPTS = 4


def lookup_scores(model: Any, attentions: list[Trainable], writer: TaskWriter, tokens: int, seed: int = 0) -> Tensor:
    """Share of each head's attention from the query that predicts an answer token to that token in the fact.

    Args:
        model: A STILL model, used with softmax attention.
        writer: Writes the PROMPTS needle prompts of `tokens` tokens, with the fact in different places.

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
    """`lookup_scores` [layers, H] of one prompt, ids [T], whose last `count` tokens are an answer that occurred before."""
    tokens = len(prompt)
    windows = np.lib.stride_tricks.sliding_window_view(prompt, count)
    fact = int((windows == prompt[-count:]).all(1).argmax())  # the first occurrence
    queries = torch.arange(tokens - count - 1, tokens - 1, device=model.device)
    future = torch.arange(tokens, device=model.device) > queries[:, None]
    seen: list[Tensor] = []

    def look(module: Any, arguments: Any, kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else arguments[0]
        query, key, _ = module.project_heads(hidden, kwargs.get("position_embeddings"))
        keys = key[0].repeat_interleave(query.shape[2] // key.shape[2], dim=1).float()
        logits = torch.einsum("qhd,khd->hqk", query[0, queries].float(), keys) * module.head_dim**-0.5
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


LOOKS_UP = 0.25
"""A layer looks facts up if its score is at least this share of the largest: 4 of SmolLM2's 30 layers do, and the fifth has 24%."""


@dataclass(frozen=True)
class Needs:
    """Each layer's share of all needs, by the layer's number: `text` (see `damages`) and `lookup` (see `lookup_scores`). Layers with a
    window of their own have none."""

    text: dict[int, float]
    lookup: dict[int, float]

    def ranked(self) -> list[int]:
        """All layers, by need of softmax; equal needs by number."""
        return sorted(self.text, key=lambda layer: (-self.text[layer] - self.lookup[layer], layer))

    def text_left(self, count: int) -> float:
        """Share of the text's needs in the layers after the first `count`."""
        return sum(self.text[layer] for layer in self.ranked()[count:])

    @classmethod
    def read(cls, values: dict[str, dict[str, float]]) -> Needs:
        """From JSON, whose keys are texts."""
        return cls(**{name: {int(layer): share for layer, share in of.items()} for name, of in values.items()})

    def looking(self) -> int:
        """Number of layers that look facts up."""
        most = max(self.lookup.values())
        return sum(score >= LOOKS_UP * most for score in self.lookup.values())


def needs_of(run: LinearizationRun, model: Any, attentions: list[Trainable]) -> Needs:
    """Needs in a run's untrained model with all layers linearized; both kinds have equal weight. A minute for 135M parameters on two
    cores."""
    writer = TaskWriter(run.tokenizer, run.corpus.train)
    lookup = lookup_scores(model, attentions, writer, min(ROW_TOKENS, run.context), run.recipe.seed).sum(1)
    longest = min(ROW_TOKENS, run.context, len(run.corpus.held_out))
    ids = held_out_rows(run.corpus, 1, longest).to(run.accelerator.device)
    text = damages(model, attentions, ids, (None,))[:, 0].tolist()
    layers = [attention.layer_idx for attention in attentions]
    return Needs(*(dict(zip(layers, shares(values), strict=True)) for values in (text, lookup.tolist())))


def shares(values: Sequence[float]) -> list[float]:
    """`values` divided by their sum; all 0 if the sum is 0."""
    total = sum(values)
    return [value / total if total else 0.0 for value in values]
