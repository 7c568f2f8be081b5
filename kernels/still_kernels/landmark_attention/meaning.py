"""Definition of still::LandmarkAttention: softmax attention with landmark logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from still_graphs.errors import ShapeError
from still_kernels.attention.meaning import BLOCK, AttentionState, blocked_attention, op_of_keys
from still_kernels.attention.meaning import Inputs as AttentionInputs
from still_kernels.landmark_attention.spec import LANDMARK_ATTENTION

RETRIEVED = 32
"""Tokens whose blocks are gathered at once."""


@dataclass(frozen=True)
class Inputs(AttentionInputs):
    """Inputs of attention, and:

    block_tokens: Tokens of a block, including its landmark, the last one.
    top_blocks: Number of earlier blocks that a head of a token reads; 0: all, and queries and keys already have RoPE.
    rope_base: Base of RoPE if top_blocks is not 0.
    """

    block_tokens: int = 51
    top_blocks: int = 0
    rope_base: float = 10000.0

    def check(self) -> tuple[int, int]:
        if self.block_tokens < 2:
            raise ShapeError(f"block_tokens={self.block_tokens} must be at least 2.")
        if self.top_blocks < 0 or (self.top_blocks and self.query.shape[3] % 2):
            raise ShapeError(
                f"top_blocks={self.top_blocks} of heads of {self.query.shape[3]}: at least 0, and even heads."
            )
        return super().check()

    def attend(self, rows: slice, query: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
        """Like `blocked_attention`, in at least float32."""
        if self.top_blocks:
            parts = query.split(RETRIEVED, dim=1)
            starts = range(length, length + query.shape[1], RETRIEVED)
            found = [self.retrieve(part, keys, values, start) for part, start in zip(parts, starts, strict=False)]
            return torch.cat([torch.zeros_like(query[:, :0]), *found], dim=1)
        wide, kv_heads, size = torch.promote_types(query.dtype, torch.float32), keys.shape[1], self.block_tokens
        outputs = [torch.zeros_like(query[:, :0])]
        for start in range(0, query.shape[1], BLOCK):
            own = query[:, start : start + BLOCK].to(wide).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
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

    def retrieve(self, query: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        """The same for few tokens from position `start`, which read `top_blocks` blocks and their own."""
        wide, size, device = torch.promote_types(query.dtype, torch.float32), self.block_tokens, query.device
        batch, tokens, heads, dim = query.shape
        group = heads // keys.shape[1]
        place = torch.arange(start, start + tokens, device=device)
        own = place // size  # [T]
        rows = query.to(wide).transpose(1, 2) * dim**-0.5  # [B, H, T, D]
        count = (start + tokens - 1) // size
        number = torch.arange(count, device=device)
        marks = keys[:, :, size - 1 :: size][:, :, :count].to(wide).repeat_interleave(group, 1)  # [B, H, C, D]
        late = (own - self.top_blocks)[:, None]
        near = self.turned(rows, place) @ self.turned(marks, number * size + size - 1).mT
        far = self.turned(rows, place - (late[:, 0] * size - 1)) @ marks.mT
        scores = torch.where(number >= late, near, far).masked_fill(number >= own[:, None], -torch.inf)
        best, chosen = scores.sort(dim=-1, descending=True, stable=True)
        best, chosen = best[..., : self.top_blocks], chosen[..., : self.top_blocks]
        chosen = torch.where(best > -torch.inf, chosen, count).sort(-1).values  # [B, H, T, k]
        real = chosen < own[:, None]
        latest = own[:, None] - torch.minimum(own, torch.tensor(self.top_blocks, device=device))[:, None]
        base = latest - 1 + (chosen >= latest).long() + torch.arange(chosen.shape[-1], device=device)
        itself = own[:, None].expand(batch, heads, tokens, 1)
        base, chosen = torch.cat((base, itself), -1), torch.cat((chosen, itself), -1)
        inside = torch.arange(size, device=device)
        row = torch.minimum(chosen[..., None] * size + inside, place[:, None, None])  # [B, H, T, k + 1, size]
        which = torch.arange(batch, device=device).reshape(-1, 1, 1, 1, 1)
        head = (torch.arange(heads, device=device) // group).reshape(1, -1, 1, 1, 1)
        read, value = (x[which, head, row].to(wide) for x in (keys, values))
        rotated = self.turned(rows[..., None, :], place[:, None] - base * size)
        logits = (self.turned(read, inside) @ rotated[..., None])[..., 0]
        words, mark = logits[..., :-1], logits[..., -1:]
        shared = words - words.logsumexp(-1, keepdim=True) + mark
        shared = shared.masked_fill(~torch.cat((real, real.new_zeros(*real.shape[:-1], 1)), -1)[..., None], -torch.inf)
        seen = (own[:, None] * size + inside[:-1] <= place[:, None]).expand(batch, heads, -1, -1)
        mine = words[..., -1, :].masked_fill(~seen, -torch.inf)
        weights = torch.cat((shared[..., :-1, :].flatten(-2), mine), -1).softmax(-1)
        output = (weights[..., None, :] @ value[..., :-1, :].flatten(3, 4))[..., 0, :]
        return output.transpose(1, 2).to(query.dtype)

    def turned(self, x: Tensor, place: Tensor) -> Tensor:
        """Rotate `x` [.., D] to positions [..]."""
        half = x.shape[-1] // 2
        frequency = self.rope_base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
        angle = place[..., None].to(torch.float64) * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@op_of_keys(LANDMARK_ATTENTION, Inputs)
def landmark_attention(inputs: Inputs, state: AttentionState, in_place: bool = False) -> tuple[Tensor, AttentionState]:
    """Like `blocked_attention`, with landmarks."""
    return blocked_attention(inputs, state, in_place, attend=inputs.attend)
