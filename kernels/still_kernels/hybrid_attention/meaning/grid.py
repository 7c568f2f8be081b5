"""Positions of the tokens of one pass: queries on a grid of chunks, keys in an aligned buffer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of `x` [B, h, S, ...] at `index` [B, A], the same for every head: [B, h, A, ...]."""
    # Copies whole rows, three times as fast as a gather of single numbers.
    return torch.stack([each.index_select(1, places) for each, places in zip(x, index, strict=True)])


@dataclass(frozen=True)
class Grid:
    """Positions of a pass of T tokens; each row of the batch has `new` tokens after `past`.

    A row's queries are on `chunks` chunks of R grid rows from its current chunk c0 = past // C on; R is C, or 1 for a single token. Its
    keys are in an aligned buffer of A = C * (chunks + 2) positions that starts with chunk c0 - 2, which may wait for promotion.

    past, new: int64 [B].
    row: Row within its chunk of each grid row, [B, R].
    step: Token of the call at each grid row, [B, chunks * R]; outside 0 ... new - 1 there is none.
    position: Absolute position of each aligned key, [B, A].
    """

    chunk_size: int
    tokens: int
    chunks: int
    past: Tensor
    new: Tensor
    row: Tensor
    step: Tensor
    position: Tensor

    @classmethod
    def of(cls, chunk_size: int, tokens: int, past: Tensor, new: Tensor) -> Grid:
        """The grid of a pass."""
        device, chunk, offset = past.device, chunk_size, (past % chunk_size)[:, None]
        chunks = (int(offset.max()) + tokens - 1) // chunk + 1  # most touched ones
        # A single token needs one row, not a chunk of them.
        row = offset if tokens == 1 else torch.arange(chunk, device=device).expand(past.shape[0], chunk)
        step = (torch.arange(chunks, device=device)[:, None] * chunk + row[:, None] - offset[:, None]).flatten(1)
        position = (past[:, None] // chunk - 2) * chunk + torch.arange((chunks + 2) * chunk, device=device)
        return cls(chunk, tokens, chunks, past, new, row, step, position)

    @property
    def rows(self) -> int:
        """R, grid rows of a chunk."""
        return self.row.shape[1]

    @property
    def first_chunk(self) -> Tensor:
        """c0, [B]."""
        return self.past // self.chunk_size

    @property
    def number(self) -> Tensor:
        """Absolute number of each query chunk, [B, chunks]."""
        return self.first_chunk[:, None] + torch.arange(self.chunks, device=self.past.device)

    @property
    def in_call(self) -> Tensor:
        """Grid rows with a new token, bool [B, chunks * R]."""
        return (self.step >= 0) & (self.step < self.new[:, None])

    @property
    def seen(self) -> Tensor:
        """Aligned positions of earlier calls, bool [B, A]."""
        return self.position < self.past[:, None]

    @property
    def filled(self) -> Tensor:
        """Aligned positions with a key, in the ring or new, bool [B, A]."""
        past = self.past[:, None]
        oldest = past - 2 * self.chunk_size
        return (self.position >= 0) & (self.position >= oldest) & (self.position < past + self.new[:, None])

    def by_chunk(self, x: Tensor) -> Tensor:
        """[..., chunks * R, D] or [..., chunks * R] at dimension 2, as [B, h, chunks, R, ...]."""
        return x.unflatten(2, (self.chunks, self.rows))

    def queries(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Tokens [B, T, h, D] on the grid, [B, h, chunks * R, D], 0 in empty rows."""
        found = gather_rows(x.transpose(1, 2), self.step.clamp(0, self.tokens - 1))
        return torch.where(self.in_call[:, None, :, None], found.to(dtype), 0)

    def keys(self, ring: Tensor, fresh: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys or values of the ring [B, HK, 2C, D] and of new tokens [B, T, HK, D], aligned: [B, HK, A, D]."""
        slots = 2 * self.chunk_size
        source = torch.where(self.seen, self.position % slots, slots + self.position - self.past[:, None])
        both = torch.cat([ring.to(dtype), fresh.transpose(1, 2).to(dtype)], dim=2)
        found = gather_rows(both, source.clamp(0, slots + self.tokens - 1))
        return torch.where(self.filled[:, None, :, None], found, 0)

    def scores(self, ring: Tensor, fresh: Tensor) -> Tensor:
        """Scores of the ring [B, H, 2C] and of grid rows [B, H, chunks, R], aligned: [B, H, A]."""
        seen, size = self.seen, self.chunks * self.rows
        index = torch.where(seen, 0, self.position - self.first_chunk[:, None] * self.chunk_size)
        if self.rows == 1:
            index = torch.zeros_like(index)
        new = gather_rows(fresh.flatten(2), index.clamp(0, size - 1))
        return torch.where(seen[:, None], gather_rows(ring, self.position % (2 * self.chunk_size)), new)

    def windows(self, x: Tensor) -> Tensor:
        """The previous and the current chunk of each query chunk, [B, h, chunks, 2C, ...], from aligned [B, h, A, ...]."""
        x = x.unflatten(2, (self.chunks + 2, self.chunk_size))
        return torch.cat([x[:, :, 1 : self.chunks + 1], x[:, :, 2:]], dim=3)

    def output(self, mixed: Tensor) -> Tensor:
        """Grid rows [B, H, chunks * R, D] as tokens [B, T, H, D], 0 at padding."""
        token = torch.arange(self.tokens, device=self.past.device).expand(self.past.shape[0], self.tokens)
        place = token if self.rows == 1 else token + (self.past % self.chunk_size)[:, None]
        real = (token < self.new[:, None])[:, None, :, None]
        return torch.where(real, gather_rows(mixed, place), 0).transpose(1, 2)
