"""The definition of still::ClusterTokens: every earlier token compared, some tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.cluster_tokens.spec import CLUSTER_TOKENS
from still_kernels.sizes import counts_of, sizes_of_call
from still_kernels.torch_ops import traced_op

TOKENS = 256
"""That are compared at once."""


@dataclass(frozen=True)
class Inputs:
    """Tensors and attributes of one call; see the op's spec."""

    cluster: Tensor
    new_tokens: Tensor
    past_length: Tensor
    cluster_window: int = 64

    def check(self, state: Tensor) -> list[tuple[int, int]]:
        """Past and new tokens of each sequence, or ShapeError or CapacityError, which name what does not fit."""
        sizes = sizes_of_call(CLUSTER_TOKENS, self, clusters=state)
        if self.cluster_window < 1:
            raise ShapeError(f"cluster_window={self.cluster_window} must be at least 1.")
        return counts_of(self.past_length, self.new_tokens, sizes["T"], state.shape[2])


@traced_op(CLUSTER_TOKENS, Inputs)
def cluster_tokens(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks int32 [B, T, HK, cluster_window] (see the op), and the clusters of all tokens [B, HK, N] after the call."""
    counts = inputs.check(state)
    present, window = state.clone(), inputs.cluster_window
    blocks = torch.full((*inputs.cluster.shape, window), -1, dtype=torch.int32, device=state.device)
    for row, (past, new) in enumerate(counts):
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
