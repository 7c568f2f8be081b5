"""Inputs of a call of hybrid attention, besides the layer's configuration and its state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.hybrid_attention.config import HybridAttentionConfig


@dataclass(frozen=True)
class Inputs:
    """Tokens, feature maps and counts of one call; fp16, bf16, fp32 or fp64.

    query: After RoPE, [B, T, H, D]; T >= 1.
    key, value: [B, T, HK, D], key after RoPE.
    gate: After its sigmoid, [B, T, H, D], or None with gate="none".
    feature_q_weight, feature_k_weight: Projections, Householder folded in, [H, P, D] or [1, P, D].
    new_tokens: Number of new tokens of each row, the rest of the row is padding, int [B]; None = T for every row.
    window_factor: Weight of the softmax terms per head, [H]; None = that of the layer.

    Packed tokens are [tokens, H or HK, D], with counts in a Packing.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor | None
    feature_q_weight: Tensor
    feature_k_weight: Tensor
    new_tokens: Tensor | None = None
    window_factor: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors in order, so that `Inputs(*inputs.tensors())` is equal."""
        return tuple(vars(self).values())

    def needs_gradients(self) -> bool:
        """Whether one of the tensors asks for gradients here."""
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in self.tensors())

    def part(self, tokens: slice) -> Inputs:
        """The inputs restricted to some tokens; `new_tokens` stay."""
        gate = None if self.gate is None else self.gate[:, tokens]
        return replace(
            self, query=self.query[:, tokens], key=self.key[:, tokens], value=self.value[:, tokens], gate=gate
        )

    def check(self, config: HybridAttentionConfig, whole: bool = False) -> tuple[int, int]:
        """B and T of a call that fits the layer.

        Args:
            whole: Rows are equally long: there may be no `new_tokens`.

        Raises:
            ShapeError: Names the tensor that does not fit.
        """
        if self.query.dim() != 4:
            raise ShapeError(f"query: expected [B, T, H, D], got {list(self.query.shape)}.")
        if whole and self.new_tokens is not None:
            raise ShapeError("new_tokens: expected none, this form takes rows of equal length only.")
        batch, tokens = self.query.shape[:2]
        wide = (batch, tokens, config.num_heads, config.head_dim)
        narrow = (batch, tokens, config.num_kv_heads, config.head_dim)
        if (self.gate is None) != (config.gate == "none"):
            raise ShapeError(
                f"gate: expected {'a tensor' if self.gate is None else 'None'} with gate={config.gate!r} in the config."
            )
        for name, shape in (("query", wide), ("key", narrow), ("value", narrow), ("gate", wide)):
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ShapeError(f"{name}: expected {list(shape)}, got {list(tensor.shape)}.")
        return batch, tokens

    def counts(self) -> Tensor:
        """`new_tokens`, or T for every row, [B]."""
        if self.new_tokens is not None:
            return self.new_tokens
        batch, tokens = self.query.shape[:2]
        return torch.full((batch,), tokens, dtype=torch.int64, device=self.query.device)

    def factor(self, config: HybridAttentionConfig, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """`window_factor`, or that of the layer on the device of the tokens, [H]."""
        if self.window_factor is not None or config.window_factor is None:
            return self.window_factor
        if torch.compiler.is_compiling():
            return torch.tensor(config.window_factor, dtype=dtype, device=self.query.device)
        return _factor_tensor(config.window_factor, self.query.device, dtype)


@cache
def _factor_tensor(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Window factors on a device. Cached, because a CUDA graph cannot capture a copy from the host."""
    with torch.inference_mode(False):  # cached also for differentiated calls, which reject inference tensors
        return torch.tensor(values, dtype=dtype, device=device)
