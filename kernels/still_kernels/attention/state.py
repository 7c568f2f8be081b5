"""State of one softmax attention layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_graphs.ops.attention import ATTENTION
from still_graphs.ops.spec import CACHE
from still_kernels.attention.inputs import Inputs


@dataclass(frozen=True)
class AttentionState:
    """Keys and values after `length` [B] tokens, [B, HK, N, D] each; position p of a sequence lies in its row p. All-zero means empty.

    Kept in 8 bits they are words, [B, HK, N, D / 4] int32, and have scales, [B, HK, N] float32 (`still_kernels.codes`).
    """

    key: Tensor
    value: Tensor
    length: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        dim: int,
        rows: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        cache: str = CACHE.choices[0],
    ) -> AttentionState:
        """State of `batch` sequences that have seen nothing, with room for `rows` tokens of `heads` key/value heads."""
        symbols = {"B": batch, "HK": heads, "N": rows, "D": dim}
        tensors = {
            s.name: torch.zeros(
                s.sizes(symbols), dtype=dtype if s.dtype == "T" else getattr(torch, s.dtype), device=device
            )
            for s in ATTENTION.states_with({CACHE.name: cache})
        }
        return cls(length=torch.zeros(batch, dtype=torch.int64, device=device), **tensors)

    @property
    def rows(self) -> int:
        """N, tokens that the state has room for."""
        return self.key.shape[2]

    @property
    def cache(self) -> str:
        """How rows are kept, as the op's attribute says it."""
        return CACHE.choices[self.key_scale is not None]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that exist, by name, `length` last."""
        found = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        found["length"] = found.pop("length")
        return found

    def check(self, inputs: Inputs) -> None:
        """Raise ShapeError unless every tensor fits a call with these inputs."""
        query, key = inputs.query, inputs.key
        symbols = {"B": query.shape[0], "HK": key.shape[2], "N": self.rows, "D": query.shape[3]}
        for spec in ATTENTION.states_with({CACHE.name: self.cache}):
            tensor, expected = getattr(self, spec.name), spec.sizes(symbols)
            # Float16 may be kept beside wider activations.
            kinds = (query.dtype, torch.float16) if spec.dtype == "T" else (getattr(torch, spec.dtype),)
            if tensor is None or tuple(tensor.shape) != expected or tensor.dtype not in kinds:
                got = "nothing" if tensor is None else f"{list(tensor.shape)} of {tensor.dtype}"
                raise ShapeError(
                    f"state {spec.name}: expected {list(expected)} of {kinds[0]}, got {got}. "
                    "Start from AttentionState.empty."
                )
        if tuple(self.length.shape) != (symbols["B"],):
            raise ShapeError(f"state length: expected [{symbols['B']}], got {list(self.length.shape)}.")
