"""Feeding rules of models that need more than their tokens one after the other. No torch, no runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Feeding:
    """A model's feeding rules.

    Args:
        every: The runner inserts a token after every so many tokens of the text; 0: never.
        token: The inserted id.
        whole_prompts: The model needs the whole prompt in one call, which continues no earlier state.
    """

    every: int = 0
    token: int = 0
    whole_prompts: bool = False

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Feeding:
        """The rules in a package's manifest."""
        found = manifest.get("feeding") or {}
        inserted = found.get("inserted") or {}
        return cls(inserted.get("every", 0), inserted.get("id", 0), bool(found.get("whole_prompts")))

    def text_tokens(self, length: int) -> int:
        """Tokens of the text in a sequence of `length` tokens."""
        return length - length // (self.every + 1) if self.every else length

    def length(self, tokens: int) -> int:
        """Tokens of a sequence for a text of `tokens` tokens."""
        return tokens + tokens // self.every if self.every else tokens

    def fed(self, tokens: np.ndarray, length: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens to feed for `tokens` [.., T] of a text after `length` tokens, places [T]). Logits after token t lie at
        places[t]: after the inserted token, if one follows."""
        places = np.arange(tokens.shape[-1])
        if not self.every:
            return tokens, places
        known = self.text_tokens(length)
        places = places + (known + places) // self.every - known // self.every
        found = np.full((*tokens.shape[:-1], self.length(known + tokens.shape[-1]) - length), self.token, tokens.dtype)
        found[..., places] = tokens
        return found, np.append(places[1:], found.shape[-1]) - 1

    def step(self, token: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens to feed for one token [B] of each text: ids [B, 1 or 2], and the number of valid ones, [B]."""
        full = (
            np.zeros_like(length)
            if not self.every
            else (length % (self.every + 1) == self.every - 1).astype(length.dtype)
        )
        ids = np.stack([token, np.full_like(token, self.token)], axis=1)[:, : 1 + int(full.max(initial=0))]
        return ids, 1 + full
