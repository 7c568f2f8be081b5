"""What a call of softmax attention reads, beside its state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_graphs.errors import ShapeError


@dataclass(frozen=True)
class Inputs:
    """Tokens and counts of one call; fp16, bf16, fp32 or fp64.

    query: After RoPE, [B, T, H, D].
    key, value: [B, T, HK, D], key after RoPE; query head h has key/value head h // (H / HK).
    new_tokens: Tokens that each sequence brings, the rest of its T is padding, int [B]; None = T for all.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    new_tokens: Tensor | None = None

    def wants_gradients(self) -> bool:
        """Whether one of the tensors asks for gradients here."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))

    def check(self) -> tuple[int, int]:
        """B and T of a call, or ShapeError naming the tensor that does not fit."""
        if self.query.dim() != 4 or self.key.dim() != 4:
            shapes = f"{list(self.query.shape)} and {list(self.key.shape)}"
            raise ShapeError(f"query, key: expected [B, T, H, D], got {shapes}.")
        batch, tokens, heads, dim = self.query.shape
        narrow = (batch, tokens, self.key.shape[2], dim)
        for name in ("key", "value"):
            if (shape := tuple(getattr(self, name).shape)) != narrow:
                raise ShapeError(f"{name}: expected {list(narrow)}, got {list(shape)}.")
        if heads % max(narrow[2], 1) or not narrow[2]:
            raise ShapeError(f"query has {heads} heads, which is no multiple of the {narrow[2]} of key.")
        return batch, tokens
