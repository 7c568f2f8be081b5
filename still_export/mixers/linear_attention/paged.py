"""Linear attention for an engine that serves many requests and owns their states."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from still_export.mixers.paged import PagedLayer
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.paged import linear_attention_paged
from still_kernels.linear_attention.pages import Pages
from still_kernels.linear_attention.spec import DELTA
from still_kernels.packing import PagedStates
from still_kernels.plan import Call
from still_kernels.registry import kernels_of


class PagedLinearAttention(PagedLayer):
    """One rank's heads of a layer with the state of one still::LinearAttention.

    Args:
        rule, scale: See the op.
        states: H of the op, on this rank.
        shared: Query heads that share a state.
        dim: D and V.
        per_key: The decay is per channel of a key.
    """

    def __init__(self, rule: str, scale: float, states: int, shared: int, dim: int, per_key: bool) -> None:
        self.rule, self.scale, self.states, self.shared, self.dim, self.per_key = (
            rule, scale, states, shared, dim, per_key,
        )  # fmt: skip
        self.names = ("query", "key", "value", "decay", *(["beta"] if rule in DELTA else []))

    def refusals(self, dtype: torch.dtype) -> list[str]:
        sizes = {"H": self.states, "HQ": self.states, "G": self.shared, "D": self.dim, "V": self.dim}
        attributes = {"update_rule": self.rule, "scale": self.scale}
        return kernels_of("LinearAttention").refusals(Call(sizes, attributes, dtype=str(dtype).removeprefix("torch.")))

    def pages(
        self, tokens: int, capacity_tokens: int, dtype: torch.dtype, linear: torch.dtype = torch.float32
    ) -> Pages:
        return Pages.of(self.states, self.dim, self.dim)

    def attend(
        self, heads: Mapping[str, Tensor], weights: Mapping[str, Tensor], states: PagedStates, output: Tensor
    ) -> None:
        inputs = Inputs(**heads, update_rule=self.rule, scale=self.scale)  # type: ignore[arg-type]
        linear_attention_paged(inputs, states, output.unflatten(1, (-1, self.shared)))
