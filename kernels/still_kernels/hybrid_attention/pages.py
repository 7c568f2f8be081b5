"""How the states of requests lie in the pages of an engine, all of one size: what has a fixed size in a request's first pages, salient rows
in pages that it gets as it grows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.state import state_names, state_shape

ROWS = 128
"""Salient rows of a select head that lie side by side, of which pages hold multiples: what attend_tma copies at a time."""
SALIENT = ("salient_key", "salient_value")
"""States that grow, and with their scales lie in pages of their own."""
ALIGNMENT = 64
"""Bytes that pages, and states within them, are multiples of: kernels read rows in wide pieces. Pages hold whole salient rows too."""

_State = tuple[str, tuple[int, ...], torch.dtype, int]


@dataclass(frozen=True)
class Pages:
    """The pages of a request, in the order of its table: one with all states but S and the salient cache; those of S, query head by query
    head; then by turns pages of salient keys and of salient values. S in bfloat16 has a rest (`narrow`), kv_rest, behind it in its pages;
    salient rows in 8 bits have their scales behind them in theirs.

    Args:
        config: The layer, without what differs from layer to layer.
        size_bytes: From a page to the next.
        heads: Query heads whose S a page holds.
        rows: Salient rows that a page holds, of each select head; a multiple of ROWS.
        slots: N, salient slots of a request at most.
        states: Name, shape and type of what one page has of each state, and where: bytes from its beginning.
    """

    config: HybridAttentionConfig
    size_bytes: int
    heads: int
    rows: int
    slots: int
    states: tuple[_State, ...]

    @classmethod
    def of(
        cls, config: HybridAttentionConfig, slots: int, dtype: torch.dtype, linear: torch.dtype = torch.float32
    ) -> Pages:
        """The pages that take the least memory for a request that fills `slots` slots.

        Args:
            dtype: Of activations.
            linear: Of S: float32 or bfloat16.
        """
        codes = config.cache == "int8"
        row_type = torch.int32 if codes else dtype  # a word is four codes
        kinds = {
            name: row_type if name in ("window_key", "window_value") else torch.float32 for name in state_names(config)
        }
        salient = {name for name in kinds if name.startswith(SALIENT)}
        offset, states = 0, []
        for name in state_names(config):
            if name not in salient | {"kv_state"}:
                shape = state_shape(config, name, 1, slots)[1:]
                states.append((name, shape, kinds[name], offset))
                offset += _aligned(math.prod(shape) * kinds[name].itemsize)
        row_shape = state_shape(config, "salient_key", 1, 1)[-1:]
        vector_bytes = row_shape[0] * row_type.itemsize
        whole = math.lcm(ALIGNMENT, vector_bytes)
        numbers = config.state_features * config.head_dim
        narrow = linear != torch.float32
        row_bytes = config.select_heads * (vector_bytes + 4 * codes)
        least = max(offset, ROWS * row_bytes)
        found: list[Pages] = []
        for count in range(1, config.num_heads + 1):
            rest = _aligned(count * numbers * linear.itemsize)
            size = _aligned(max(rest + narrow * count * numbers, least if count == config.num_heads else 0), whole)
            sizes = [size]
            if codes:  # rows of which, scales and all, seldom fill what S does: or as much more as they take
                sizes.append(_aligned(_aligned(size, ROWS * row_bytes), whole))
            for size in (x for x in sizes if x >= least):
                rows = size // (ROWS * row_bytes) * ROWS
                shape = (count, config.state_features, config.head_dim)
                shapes: list[_State] = [
                    ("kv_state", shape, linear, 0),
                    *[("kv_rest", shape, torch.int8, rest)] * narrow,
                ]
                held = (config.select_heads, rows)
                for name in sorted(salient):
                    if name in SALIENT:
                        shapes.append((name, held + row_shape, row_type, 0))
                    else:
                        shapes.append((name, held, torch.float32, math.prod(held) * vector_bytes))
                alike = replace(config, window_factor=None)
                found.append(cls(alike, size, count, rows, slots, (*states, *shapes)))
        return min(found, key=lambda pages: pages.count(slots) * pages.size_bytes)

    @property
    def first(self) -> int:
        """Pages that a request has from its first token on: of all but salient rows."""
        return 1 + -(-self.config.num_heads // self.heads)

    def count(self, slots: int) -> int:
        """Pages of a request that has filled `slots` slots."""
        return self.first + 2 * -(-slots // self.rows)

    def after(self, tokens: int) -> int:
        """Pages of a request of `tokens` tokens."""
        return self.count(min(self.slots, self.config.slots_for(tokens)))

    def changing(self, tokens: int) -> tuple[int, ...]:
        """Columns of those pages of a request of `tokens` tokens that later tokens still write to."""
        closed = 0
        if self.config.overflow == "error":  # else rows give place to others
            # Rows of chunks that are still in the window count as filled already.
            settled = max(0, tokens - 2 * self.config.chunk_size)
            closed = 2 * (min(self.slots, self.config.slots_for(settled)) // self.rows)
        return (*range(self.first), *range(self.first + closed, self.after(tokens)))

    @property
    def columns(self) -> int:
        """Of a request's table."""
        return self.count(max(self.slots, 1))

    @property
    def kernel(self) -> tuple[int, ...]:
        """What kernels are compiled for; `triton_pages` says what it is."""
        return (self.size_bytes, self.columns, self.first, self.heads, self.rows, self.rest)

    @property
    def rest(self) -> int:
        """Bytes from the beginning of a page of S to the rest; 0: S is in float32."""
        return next((offset for name, _, _, offset in self.states if name == "kv_rest"), 0)

    @property
    def row_bytes(self) -> int:
        """Bytes of one salient row of a select head."""
        return next(shape[-1] * dtype.itemsize for name, shape, dtype, _ in self.states if name == "salient_key")

    def padded(self, size_bytes: int) -> Pages:
        """The same in pages of an engine that made them larger.

        Raises:
            ShapeError: They do not hold whole salient rows any more.
        """
        if size_bytes < self.size_bytes or size_bytes % math.lcm(ALIGNMENT, self.row_bytes):
            raise ShapeError(
                f"pages of {size_bytes} bytes; expected a multiple of {ALIGNMENT} and of rows of {self.row_bytes} bytes."
            )
        return replace(self, size_bytes=size_bytes)

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Each state as pages hold it, [pages, *shape] by name, of int8 [pages, bytes], whose rows lie `size_bytes` apart.

        Of kv_state and kv_rest the shape is [heads, F, D], of salient keys and values [HS, rows, D], or [HS, rows, D / 4] of words and
        [HS, rows] of their scales.
        """
        return {
            name: memory[:, offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).unflatten(1, shape)
            for name, shape, dtype, offset in self.states
        }


def _aligned(size: int, whole: int = ALIGNMENT) -> int:
    return -(-size // whole) * whole
