"""Layout of requests' states in an engine's pages of one size. A request's first pages have the states of fixed size. Salient rows are in
pages that are added as the request grows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.state import state_names, state_shape

ROWS = 128
"""Salient rows of a select head that are consecutive: attend_tma copies this many at a time, and pages have a multiple of it."""
SALIENT = ("salient_key", "salient_value")
"""Growing states, which with their scales have pages of their own."""
ALIGNMENT = 64
"""Pages and the states in them are aligned to this many bytes, because kernels read rows in wide pieces. Pages have whole salient rows."""

_State = tuple[str, tuple[int, ...], torch.dtype, int]


@dataclass(frozen=True)
class Pages:
    """The pages of a request, in the order of its table.

    The first page has all states except S and the salient cache. Pages of S follow, by query head, then alternating pages of salient keys
    and of salient values. S in bfloat16 has its rest (`narrow`), kv_rest, after it in the same pages; 8-bit salient rows have their scales
    after them.

    Args:
        config: The layer, without values that differ from layer to layer.
        size_bytes: From a page to the next.
        heads: Query heads with S in a page.
        rows: Salient rows in a page, of each select head; a multiple of ROWS.
        slots: N, most salient slots of a request.
        states: Name, shape, type and byte offset of each state in a page.
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
        """The pages with the least memory for a request that fills `slots` slots.

        Args:
            dtype: Type of activations.
            linear: Type of S: float32 or bfloat16.
        """
        codes = config.cache == "int8"
        row_type = torch.int32 if codes else dtype  # a word has four codes
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
            if codes:  # rows with scales that rarely fill a page of S's size: pages are enlarged to fit
                sizes.append(_aligned(_aligned(size, ROWS * row_bytes), whole))
            for size in (x for x in sizes if x >= least):
                rows = size // (ROWS * row_bytes) * ROWS
                shape = (count, config.state_features, config.head_dim)
                shapes: list[_State] = [
                    ("kv_state", shape, linear, 0),
                    *[("kv_rest", shape, torch.int8, rest)] * narrow,
                ]
                lead = (config.select_heads, rows)
                for name in sorted(salient):
                    if name in SALIENT:
                        shapes.append((name, lead + row_shape, row_type, 0))
                    else:
                        shapes.append((name, lead, torch.float32, math.prod(lead) * vector_bytes))
                alike = replace(config, window_factor=None)
                found.append(cls(alike, size, count, rows, slots, (*states, *shapes)))
        return min(found, key=lambda pages: pages.count(slots) * pages.size_bytes)

    @property
    def first(self) -> int:
        """Pages of a request from its first token on: all except salient rows."""
        return 1 + -(-self.config.num_heads // self.heads)

    def count(self, slots: int) -> int:
        """Pages of a request with `slots` filled slots."""
        return self.first + 2 * -(-slots // self.rows)

    def after(self, tokens: int) -> int:
        """Pages of a request of `tokens` tokens."""
        return self.count(min(self.slots, self.config.slots_for(tokens)))

    def changing(self, tokens: int) -> tuple[int, ...]:
        """Table columns of a request of `tokens` tokens whose pages later tokens still write."""
        closed = 0
        if self.config.overflow == "error":  # otherwise rows are replaced
            # Rows of chunks that are still in the window count as filled.
            settled = max(0, tokens - 2 * self.config.chunk_size)
            closed = 2 * (min(self.slots, self.config.slots_for(settled)) // self.rows)
        return (*range(self.first), *range(self.first + closed, self.after(tokens)))

    @property
    def columns(self) -> int:
        """Columns of a request's table."""
        return self.count(max(self.slots, 1))

    @property
    def kernel(self) -> tuple[int, ...]:
        """The kernels' compile-time constant; see `triton_pages`."""
        return (self.size_bytes, self.columns, self.first, self.heads, self.rows, self.rest)

    @property
    def rest(self) -> int:
        """Bytes from the start of a page of S to the rest; 0: S is float32."""
        return next((offset for name, _, _, offset in self.states if name == "kv_rest"), 0)

    @property
    def row_bytes(self) -> int:
        """Bytes of one salient row of a select head."""
        return next(shape[-1] * dtype.itemsize for name, shape, dtype, _ in self.states if name == "salient_key")

    def padded(self, size_bytes: int) -> Pages:
        """The same in an engine's larger pages.

        Raises:
            ShapeError: They do not have whole salient rows.
        """
        if size_bytes < self.size_bytes or size_bytes % math.lcm(ALIGNMENT, self.row_bytes):
            raise ShapeError(
                f"pages of {size_bytes} bytes; expected a multiple of {ALIGNMENT} and of rows of {self.row_bytes} bytes."
            )
        return replace(self, size_bytes=size_bytes)

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Views of each state, [pages, *shape] by name, of int8 [pages, bytes], whose rows are `size_bytes` apart.

        The shape of kv_state and kv_rest is [heads, F, D]. Salient keys and values are [HS, rows, D], or words [HS, rows, D / 4] with
        scales [HS, rows].
        """
        return {
            name: memory[:, offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).unflatten(1, shape)
            for name, shape, dtype, offset in self.states
        }


def _aligned(size: int, whole: int = ALIGNMENT) -> int:
    return -(-size // whole) * whole
