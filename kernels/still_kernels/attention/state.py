"""State of one softmax attention layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_graphs.ops.attention import ATTENTION
from still_kernels.attention.inputs import Inputs


@dataclass(frozen=True)
class AttentionState:
    """Keys and values after `length` [B] tokens, [B, HK, N, D] each; position p of a row lies in its row p. All-zero means empty."""

    key: Tensor
    value: Tensor
    length: Tensor

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        dim: int,
        rows: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> AttentionState:
        """State of `batch` rows that have seen nothing, with room for `rows` tokens of `heads` key/value heads."""
        symbols = {"B": batch, "HK": heads, "N": rows, "D": dim}
        tensors = {s.name: torch.zeros(s.sizes(symbols), dtype=dtype, device=device) for s in ATTENTION.states}
        return cls(length=torch.zeros(batch, dtype=torch.int64, device=device), **tensors)

    @property
    def rows(self) -> int:
        """N, tokens that the state has room for."""
        return self.key.shape[2]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, `length` last."""
        return {"key": self.key, "value": self.value, "length": self.length}

    def check(self, inputs: Inputs) -> None:
        """Raise ShapeError unless every tensor fits a call with these inputs."""
        query, key = inputs.query, inputs.key
        expected = (query.shape[0], key.shape[2], self.rows, query.shape[3])
        for name in ("key", "value"):
            tensor = getattr(self, name)
            # Float16 may be kept beside wider activations.
            if tuple(tensor.shape) != expected or tensor.dtype not in (query.dtype, torch.float16):
                raise ShapeError(
                    f"state {name}: expected {list(expected)} of {query.dtype}, got {list(tensor.shape)} of {tensor.dtype}. "
                    "Start from AttentionState.empty."
                )
        if tuple(self.length.shape) != expected[:1]:
            raise ShapeError(f"state length: expected [{expected[0]}], got {list(self.length.shape)}.")
