"""The interface of a layer for a serving engine: its pages, and one rank's heads over packed tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from still_export.errors import UnsupportedModelError
from still_kernels.packing import PagedStates


class Pages(Protocol):
    """Pages of equal size with a request's states of a layer; a growing request gets more pages."""

    @property
    def size_bytes(self) -> int:
        """Distance between pages."""

    @property
    def columns(self) -> int:
        """Largest number of pages of a request."""

    def after(self, tokens: int) -> int:
        """Number of pages of a request with `tokens` tokens."""

    def changing(self, tokens: int) -> Sequence[int]:
        """Columns of a request's pages that later tokens will still write, after `tokens` tokens."""

    def padded(self, size_bytes: int) -> Self:
        """The same pages, enlarged by the engine."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class PagedProjection:
    """A linear layer of the hidden states besides query, key and value, for an engine with parallel layers.

    size: Channels per query head.
    bias: Whether it has a bias.
    low_rank: Channels between two layers, `<name>.0` (without bias) and `<name>.1`; 0: one layer.
    """

    size: int
    bias: bool
    low_rank: int = 0


Turn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Applies RoPE to queries and keys [.., heads, D], keeping their type."""


@dataclass(frozen=True)
class PagedTokens:
    """Packed tokens of a call for one rank of a layer.

    heads: Query [tokens, H, D], key and value [tokens, HK, D], after norms and before RoPE.
    projected: Results of the layer's `projections`, by name, [tokens, H * size].
    turn: RoPE of query and key.
    """

    heads: tuple[Tensor, Tensor, Tensor]
    projected: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    turn: Turn


class PagedLayer(Protocol):
    """One rank's heads of a layer, over packed tokens of many requests with states in an engine's pages.

    The engine computes queries, keys, values and `projections`. `inputs` and `result` run before and after the states' update, and are
    compiled with the rest of the model.
    """

    projections: Mapping[str, PagedProjection]
    """Further projections, by parameter name."""

    head_weights: Mapping[str, tuple[int, ...]]
    """Shapes of further parameters over all ranks; the first dimension is query heads, or 1 if heads share them."""

    names: tuple[str, ...]
    """Names of the tensors that `inputs` returns."""

    linear_states: tuple[torch.dtype, ...] = (torch.float32,)
    """Supported types of the linear state."""

    codes: bool = False
    """Whether its pages store keys and values in 8 bits if the model's cache is int8."""

    window: int = 0
    """Window of an additional softmax attention by the engine, in tokens including the current one; 0: none."""

    def inputs(self, packed: PagedTokens) -> dict[str, Tensor]:
        """Arguments of `attend`, each [tokens, ...]."""

    def result(self, output: Tensor, window: Tensor | None, packed: PagedTokens) -> Tensor:
        """Input of the layer's last projection, [tokens, H, D], from the outputs of `attend` and of the engine's attention."""
        return output

    def refusals(self, dtype: torch.dtype) -> list[str]:
        """Reasons why no CUDA kernel covers the layer, one line per property; empty if one does."""

    def pages(
        self, tokens: int, capacity_tokens: int, dtype: torch.dtype, linear: torch.dtype = torch.float32
    ) -> Pages:
        """The page layout for requests of at most `tokens` tokens.

        Args:
            capacity_tokens: Number of tokens that the model's states have room for.
            linear: Type of the linear state, one of `linear_states`.
        """

    def attend(
        self, heads: Mapping[str, Tensor], weights: Mapping[str, Tensor], states: PagedStates, output: Tensor
    ) -> None:
        """Attend and update the states in place.

        Args:
            weights: This rank's `head_weights`.
            output: [tokens, H, D], written where the sequences have tokens.
        """


def heads_of_rank(heads: int, kv_heads: int, ranks: int) -> tuple[int, int]:
    """Query heads and key/value heads of each of `ranks`; with more ranks than key/value heads, several ranks have the same key/value
    heads.

    Raises:
        UnsupportedModelError: The heads cannot be divided so.
    """
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise UnsupportedModelError(
            f"{ranks} ranks cannot share num_attention_heads={heads} and num_key_value_heads={kv_heads} evenly. "
            "Choose another --tensor-parallel-size."
        )
    return heads // ranks, max(1, kv_heads // ranks)
