"""Definition of still::CausalConv in PyTorch: inputs of a call, and all tokens at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from still_graphs.errors import ShapeError, unknown
from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.sizes import tensors_of


@dataclass(frozen=True)
class Inputs:
    """Tokens and weights of one call; fp16, bf16, fp32 or fp64.

    input: [B, T, C].
    weight: A tap for each of the latest K tokens, oldest first, [C, 1, K].
    bias: [C], or None.
    new_tokens: Number of new tokens of each sequence, the rest of T is padding, int [B]; None = T for all.
    activation: none or silu.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    new_tokens: Tensor | None = None
    activation: str = "none"

    @property
    def wide(self) -> torch.dtype:
        """Type of the computation: at least float32."""
        return torch.promote_types(self.input.dtype, torch.float32)

    def needs_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors_of(self).values())

    def counts(self) -> Tensor:
        """Number of new tokens of each sequence, [B]."""
        batch, tokens, _ = self.input.shape
        if self.new_tokens is None:
            return torch.full((batch,), tokens, dtype=torch.int64, device=self.input.device)
        return self.new_tokens

    def check(self, state: Tensor) -> None:
        """Raise ShapeError for a tensor or attribute that does not fit."""
        known = CAUSAL_CONV.attribute("activation").choices
        if self.activation not in known:
            raise unknown(self.activation, known, f"activation={self.activation!r}", ShapeError)
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
    """State [B, C, K - 1] of empty sequences: zeros replace the tokens before the first."""
    return torch.zeros(batch, channels, taps - 1, dtype=dtype, device=device)


def whole_causal_conv(inputs: Inputs, state: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """The weighted sum of each channel's latest K tokens, in at least float32, then bias and activation. Any split of a sequence gives the
    same result.

    Args:
        state: The latest K - 1 tokens of the sequences, oldest first, [B, C, K - 1].
        in_place: Write into `state`, and return it.

    Returns:
        output [B, T, C], dtype of input, 0 at padding, which affects nothing else; and the state after the call.
    """
    inputs.check(state)
    tokens, past = inputs.input.shape[1], state.shape[2]
    counts = inputs.counts()
    real = (torch.arange(tokens, device=counts.device) < counts[:, None])[..., None]  # [B, T, 1]
    fresh = inputs.input.masked_fill(~real, 0)
    known = torch.cat((state.transpose(1, 2), fresh), dim=1)  # [B, K - 1 + T, C]
    taps = inputs.weight[:, 0].to(inputs.wide)
    total: Tensor | float = 0.0 if inputs.bias is None else inputs.bias.to(inputs.wide)
    for tap in range(past + 1):
        total = total + known[:, tap : tap + tokens].to(inputs.wide) * taps[:, tap]
    assert isinstance(total, Tensor)
    total = silu(total) if inputs.activation == "silu" else total
    place = counts[:, None] + torch.arange(past, device=counts.device)  # the latest K - 1 columns, [B, K - 1]
    present = known.gather(1, place[..., None].expand(-1, -1, known.shape[2])).transpose(1, 2).contiguous()
    output = total.masked_fill(~real, 0).to(inputs.input.dtype)
    return output, state.copy_(present) if in_place else present
