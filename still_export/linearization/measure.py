"""What a model predicts and finds: bits per byte of held-out text, and facts beyond the window of a linearized layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from still_export.errors import ConfigError
from still_export.linearization.losses import head_losses, without_head
from still_export.texts.forms import NaturalWriter
from still_export.texts.texts import Corpus, held_out_rows
from still_export.texts.turns import turn_pieces

CONTEXTS = {4096: 1, 1024: 1}
"""Rows of text by length. The beginning of a longer row also counts for the shorter length."""
QUESTIONS = {1024: 8, 4096: 1}
"""Prompts by length. Together with the text, two cores read them in about a minute."""
SEED = 7919
"""Seed of the prompts; no training row begins with it."""


@dataclass(frozen=True)
class Measured:
    """bits: Bits per byte by context. found: Of `asked` facts, those with the most likely token in every place."""

    bits: dict[int, float]
    found: int = 0
    asked: int = 0

    def losses(self, base: Measured) -> dict[int, float]:
        """Relative increase of bits per byte over the base, by context."""
        return {context: bits / base.bits[context] - 1 for context, bits in self.bits.items()}

    def compared(self, base: Measured) -> str:
        """The results next to the base's, in words."""
        losses = ", ".join(f"{loss:+.1%} at {context:,}" for context, loss in self.losses(base).items())
        return f"bits per byte {losses}" + (f"; finds {self.found} facts, the base {base.found}" if self.asked else "")


class Yardstick:
    """The same texts and questions for a base and the models made from it.

    Args:
        corpus: Its held-out text is predicted, and contains the facts.
        context: Longest sequence of the model.

    Raises:
        ConfigError: The held-out text is shorter than every context.
    """

    def __init__(self, corpus: Corpus, tokenizer: Any, context: int) -> None:
        least = min(min(CONTEXTS), context)
        rest = held_out_rows(corpus, len(corpus.held_out) // least, least).flatten()
        self.rows: list[Tensor] = []
        for length, count in CONTEXTS.items():
            for _ in range(count):
                size = min(length, context)
                if len(rest) >= size:
                    self.rows.append(rest[None, :size])
                    rest = rest[size:]
        self.contexts = sorted({row.shape[1] for row in self.rows})
        self.bytes_per_token = corpus.bytes_per_token
        writer = NaturalWriter(tokenizer, corpus.held_out, turn_pieces(tokenizer))
        self.prompts: list[tuple[Tensor, int]] = []
        for length, count in QUESTIONS.items():
            rng = np.random.default_rng((SEED, length))
            for number in range(count):
                try:
                    ids, answer = writer.prompt(min(length, context), (number + 0.5) / count * 0.8, rng)
                except ConfigError:  # with byte tokens even one fact may exceed a small model's context
                    continue
                self.prompts.append((torch.from_numpy(ids)[None], answer))

    @property
    def tokens(self) -> int:
        """Tokens that a measurement reads."""
        return sum(row.numel() for row in self.rows) + sum(ids.numel() for ids, _ in self.prompts)

    def keep(self, tokens: float) -> None:
        """Reduce texts and questions to `tokens` in all, the shortest first, half of them for text; at least one row stays."""
        rows = sorted(self.rows, key=Tensor.numel)
        self.rows = [row for i, row in enumerate(rows) if not i or sum(map(Tensor.numel, rows[: i + 1])) <= tokens / 2]
        self.contexts = sorted({row.shape[1] for row in self.rows})
        read = sum(map(Tensor.numel, self.rows))
        prompts, self.prompts = sorted(self.prompts, key=lambda prompt: prompt[0].numel()), []
        for ids, answer in prompts:
            read += ids.numel()
            if read <= tokens:
                self.prompts.append((ids, answer))

    @torch.no_grad()
    def measured(self, model: Any, questions: bool = True) -> Measured:
        """Measure `model` in its current modes; only text without `questions`."""
        weight = model.get_output_embeddings().weight
        nats: dict[int, list[float]] = {context: [] for context in self.contexts}
        for row in self.rows:
            ids = row.to(weight.device)
            losses = head_losses(last_hidden(model, ids), weight, ids.roll(-1, dims=1))[0]
            for context in self.contexts:  # a token's loss does not depend on later tokens
                if context <= len(losses):
                    nats[context].append(float(losses[: context - 1].mean()))
        scale = math.log(2) * self.bytes_per_token
        bits = {context: sum(values) / len(values) / scale for context, values in nats.items()}
        prompts: Sequence[tuple[Tensor, int]] = self.prompts if questions else ()
        return Measured(bits, sum(finds(model, ids, answer) for ids, answer in prompts), len(prompts))


@torch.no_grad()
def finds(model: Any, ids: Tensor, answer: int) -> bool:
    """Whether each of the last `answer` tokens of ids [1, T] is the most likely one."""
    head = model.get_output_embeddings().weight
    ids = ids.to(head.device)
    hidden = last_hidden(model, ids)[0, -answer - 1 : -1]
    return bool(((hidden.to(head.dtype) @ head.T).argmax(-1) == ids[0, -answer:]).all())


def last_hidden(model: Any, ids: Tensor) -> Tensor:
    """Input of the model's head for ids [B, T]: [B, T, channels]."""
    with without_head(model):
        return model(ids, use_cache=False).logits
