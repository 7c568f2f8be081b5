"""The definition of still::ClusterTokens: every earlier token compared, some tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_graphs.errors import CapacityError, ShapeError
from still_kernels.cluster_tokens.spec import CLUSTER_TOKENS
from still_kernels.sizes import sizes_of, tensors_of

TOKENS = 256
"""That are compared at once."""


@dataclass(frozen=True)
class Inputs:
    """Tokens and counts of one call.

    cluster: Of each head, int [B, T, HK].
    new_tokens: Tokens that each sequence brings, the rest of its T is padding, int [B].
    past_length: Tokens that each has seen, int [B].
    cluster_window: Tokens at most.
    """

    cluster: Tensor
    new_tokens: Tensor
    past_length: Tensor
    cluster_window: int = 64

    def check(self, state: Tensor) -> None:
        """Raise ShapeError or CapacityError, which name what does not fit."""
        shapes = {name: x.shape for name, x in tensors_of(self).items()}
        sizes = sizes_of(CLUSTER_TOKENS, {**shapes, "past_clusters": state.shape})
        if list(state.shape[:2]) != [sizes["B"], sizes["HK"]]:
            raise ShapeError(f"clusters: expected {[sizes['B'], sizes['HK']]} and rows, got {list(state.shape)}.")
        if self.cluster_window < 1:
            raise ShapeError(f"cluster_window={self.cluster_window} must be at least 1.")
        for row, (count, length) in enumerate(zip(self.new_tokens.tolist(), self.past_length.tolist(), strict=True)):
            if length < 0 or not 0 <= count <= sizes["T"]:
                raise ShapeError(f"sequence {row} has length {length} and {count} new tokens of {sizes['T']}.")
            if length + count > state.shape[2]:
                raise CapacityError(
                    f"sequence {row} grows to {length + count} tokens; the state has room for {state.shape[2]}."
                )


def cluster_tokens(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks int32 [B, T, HK, cluster_window] as of the op, and the clusters of all tokens [B, HK, N] after the call.

    Raises:
        ShapeError: A tensor or attribute does not fit.
        CapacityError: A sequence outgrows the state.
    """
    inputs.check(state)
    present, window = state.clone(), inputs.cluster_window
    blocks = torch.full((*inputs.cluster.shape, window), -1, dtype=torch.int32, device=state.device)
    for row, (past, new) in enumerate(zip(inputs.past_length.tolist(), inputs.new_tokens.tolist(), strict=True)):
        own = inputs.cluster[row, :new].T.to(state.dtype)  # [HK, T]
        present[row, :, past : past + new] = own
        number = torch.arange(past + new, device=state.device)
        for start in range(0, new, TOKENS):
            part = slice(start, min(start + TOKENS, new))
            place = number[past + part.start : past + part.stop, None]
            same = (own[:, part, None] == present[row, :, None, : past + new]) & (number < place)
            found = torch.where(same, number, -1).topk(min(window, past + new), dim=-1).values.flip(-1)
            found = torch.nn.functional.pad(found, (window - found.shape[-1], 0), value=-1)
            found[..., -1] = torch.where(found[..., -1] < 0, place[:, 0], found[..., -1])
            blocks[row, part] = found.transpose(0, 1).to(torch.int32)
    return blocks, present
