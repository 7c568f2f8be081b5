"""What a call of the causal convolution reads, beside its state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_graphs.ops.causal_conv import CAUSAL_CONV


@dataclass(frozen=True)
class Inputs:
    """Tokens and weights of one call; fp16, bf16, fp32 or fp64.

    input: [B, T, C].
    weight: A tap for each of the latest K tokens, oldest first, [C, 1, K].
    bias: [C], or None.
    new_tokens: Tokens that each sequence brings, the rest of its T is padding, int [B]; None = T for all.
    activation: none or silu.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    new_tokens: Tensor | None = None
    activation: str = "none"

    @property
    def wide(self) -> torch.dtype:
        """The type that is computed in: at least float32."""
        return torch.promote_types(self.input.dtype, torch.float32)

    def wants_gradients(self) -> bool:
        """Whether one of the tensors asks for gradients here."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in vars(self).values() if isinstance(x, Tensor))

    def counts(self) -> Tensor:
        """Tokens that each sequence brings, [B]."""
        batch, tokens, _ = self.input.shape
        if self.new_tokens is None:
            return torch.full((batch,), tokens, dtype=torch.int64, device=self.input.device)
        return self.new_tokens

    def check(self, state: Tensor) -> None:
        """Raise ShapeError naming the tensor or attribute that does not fit."""
        known = CAUSAL_CONV.attribute("activation").choices
        if self.activation not in known:
            raise ShapeError(f"activation={self.activation!r} is unknown; known: {', '.join(known)}.")
        if self.input.dim() != 3 or self.weight.dim() != 3:
            raise ShapeError(
                f"input, weight: expected [B, T, C], [C, 1, K], got {list(self.input.shape)}, {list(self.weight.shape)}."
            )
        batch, _, channels = self.input.shape
        taps = self.weight.shape[2]
        if tuple(self.weight.shape) != (channels, 1, taps) or taps < 2:
            raise ShapeError(
                f"weight: expected [{channels}, 1, at least 2], got {list(self.weight.shape)}; every channel has taps of its own "
                "(a grouped convolution is not covered)."
            )
        expected = {"bias": (channels,), "new_tokens": (batch,)}
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ShapeError(f"{name}: expected {list(shape)}, got {list(tensor.shape)}.")
        if tuple(state.shape) != (batch, channels, taps - 1) or state.dtype != self.input.dtype:
            raise ShapeError(
                f"state: expected {[batch, channels, taps - 1]} of {self.input.dtype}, got {list(state.shape)} of {state.dtype}."
            )


def empty_state(
    batch: int,
    channels: int,
    taps: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """State [B, C, K - 1] of sequences that have seen nothing: zeros stand for the tokens before the first."""
    return torch.zeros(batch, channels, taps - 1, dtype=dtype, device=device)
