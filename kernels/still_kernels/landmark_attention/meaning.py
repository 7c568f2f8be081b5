"""The definition of still::LandmarkAttention: softmax attention whose logits go by way of landmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from still_graphs.errors import ShapeError
from still_kernels.attention.meaning import BLOCK, AttentionState, blocked_attention
from still_kernels.attention.meaning import Inputs as AttentionInputs


@dataclass(frozen=True)
class Inputs(AttentionInputs):
    """As of attention.

    block_tokens: Of a block, its landmark among them, which is the last one.
    """

    block_tokens: int = 51

    def check(self) -> tuple[int, int]:
        if self.block_tokens < 2:
            raise ShapeError(f"block_tokens={self.block_tokens} must be at least 2.")
        return super().check()

    def attend(self, rows: slice, query: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
        """As of `blocked_attention`, in at least float32."""
        wide, kept, size = torch.promote_types(query.dtype, torch.float32), keys.shape[1], self.block_tokens
        outputs = [torch.zeros_like(query[:, :0])]
        for start in range(0, query.shape[1], BLOCK):
            own = query[:, start : start + BLOCK].to(wide).unflatten(2, (kept, -1)).permute(0, 2, 3, 1, 4)
            first, end = length + start, length + start + own.shape[3]
            k, v = (x[:, :, None, :end].to(wide) for x in (keys, values))
            logits = own @ k.transpose(3, 4) * query.shape[3] ** -0.5  # [B, HK, G, T, end]
            blocks = pad(logits, (0, -end % size)).unflatten(-1, (-1, size))
            tokens, landmark = blocks[..., :-1], blocks[..., -1:]
            place, at = (torch.arange(*x, device=query.device) for x in ((end,), (first, end)))
            here = (torch.arange(blocks.shape[-2], device=query.device) == (at // size)[:, None])[..., None]
            chosen = torch.where(here, tokens, tokens - tokens.logsumexp(-1, keepdim=True) + landmark)
            chosen = pad(chosen, (0, 1), value=-torch.inf).flatten(-2)[..., :end]
            weights = chosen.masked_fill(place > at[:, None], -torch.inf).softmax(-1)
            outputs.append((weights @ v).permute(0, 3, 1, 2, 4).flatten(2, 3).to(query.dtype))
        return torch.cat(outputs, dim=1)


def landmark_attention(inputs: Inputs, state: AttentionState, in_place: bool = False) -> tuple[Tensor, AttentionState]:
    """As of `blocked_attention`, by way of landmarks.

    Raises:
        ShapeError: A tensor or attribute does not fit.
        CapacityError: A sequence outgrows the state.
    """
    return blocked_attention(inputs, state, in_place, attend=inputs.attend)
