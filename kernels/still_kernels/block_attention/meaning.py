"""The definition of still::BlockAttention: softmax attention whose mask has the chosen blocks alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.attention.meaning import AttentionState, blocked_attention
from still_kernels.attention.meaning import Inputs as AttentionInputs


@dataclass(frozen=True)
class Inputs(AttentionInputs):
    """Inputs of attention, and which blocks of `block_size` tokens each token reads.

    blocks: int [B, T, HK, S], -1 where there is none.
    """

    blocks: Tensor | None = None
    block_size: int = 64

    def check(self) -> tuple[int, int]:
        batch, tokens = super().check()
        expected = [batch, tokens, self.key.shape[2]]
        if self.blocks is None or list(self.blocks.shape[:3]) != expected or self.blocks.dim() != 4:
            got = None if self.blocks is None else list(self.blocks.shape)
            raise ShapeError(f"blocks: expected {expected} and slots, got {got}.")
        if self.block_size < 1:
            raise ShapeError(f"block_size={self.block_size} must be at least 1.")
        return batch, tokens

    def seen(self, rows: slice, tokens: slice, end: int) -> Tensor:
        """Whether tokens read each of the first `end` positions, [B, HK, T, end], causality apart."""
        assert self.blocks is not None
        count = -(-end // self.block_size)
        chosen = self.blocks[rows, tokens].transpose(1, 2).long()
        mask = torch.zeros(*chosen.shape[:3], count + 1, dtype=torch.bool, device=chosen.device)
        mask.scatter_(3, torch.where((chosen < 0) | (chosen > count), count, chosen), True)
        return mask[..., :count].repeat_interleave(self.block_size, dim=3)[..., :end]


def block_attention(inputs: Inputs, state: AttentionState, in_place: bool = False) -> tuple[Tensor, AttentionState]:
    """Like `blocked_attention`, of each token to its own `blocks`."""
    return blocked_attention(inputs, state, in_place, inputs.seen)
