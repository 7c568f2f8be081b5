"""The grid of a call: positions of its tokens and keys, and copies between them."""

from __future__ import annotations

from functools import cached_property

from still_graphs.functions.builder import INT64, Scope
from still_graphs.functions.counts import checked_counts
from still_kernels.hybrid_attention.body.layer import Layer


class Grid:
    """Index tensors of a call. Shapes: R rows of a grid chunk (C, or 1 when T = 1), A = (chunks + 2) * C aligned positions."""

    def __init__(self, scope: Scope, layer: Layer) -> None:
        self.scope, self.layer = scope, layer
        b, chunk = scope, layer.chunk
        self.tokens = b.dim("query", 1)  # T, [1]
        self.past, new = checked_counts(b, self.tokens)  # past_length, [B, 1]
        self.first = b("Div", self.past, chunk)  # c0, [B, 1]
        self.offset = b("Mod", self.past, chunk)
        self.end = b("Add", self.past, new)
        single = b("Equal", self.tokens, [1])
        need = b("Div", b.total(self.offset, new, chunk - 1), chunk)
        self.chunks = b.reshape(b("Max", b("ReduceMax", need, keepdims=0), 1), 1)  # [1]
        self.rows = b("Where", single, [1], [chunk])  # R, [1]
        self.row_base = b("Mul", self.offset, b.cast(single, INT64))  # offset where R = 1, else 0, [B, 1]
        self.row = b("Add", self.row_base, b.arange(self.rows))  # offset of each grid row in its chunk, [B, R]
        self.number = b("Add", self.first, b.arange(self.chunks))  # absolute grid chunk, [B, chunks]
        begin = b("Mul", b("Sub", self.first, 2), chunk)
        aligned = b.arange(b("Mul", b("Add", self.chunks, 2), chunk))
        self.position = b("Add", begin, aligned)  # aligned positions, [B, A]
        self.seen = b("Less", self.position, self.past)
        ring = b("Mod", self.position, 2 * chunk)
        fresh = b.total(b("Sub", self.position, self.past), 2 * chunk)
        zero_row = b("Add", self.tokens, 2 * chunk)
        oldest = b("Max", b("Sub", self.past, 2 * chunk), 0)
        filled = b.all_of(b("GreaterOrEqual", self.position, oldest), b("Less", self.position, self.end))
        # Row of each aligned position in cat([ring, new, zero]), [B, A].
        self.source = b("Where", filled, b("Where", self.seen, ring, fresh), zero_row)
        self.cells = b("Mul", self.chunks, self.rows)  # [1]

    def gather(self, x: str, index: str, heads: int, length: str, *tail: str | int) -> str:
        """Rows of x [B, h, S, ...tail] at index [B, I], the same for all heads: [B, h, I, ...tail]."""
        b = self.scope
        lead = b("Mul", b.arange(b("Mul", self.layer.batch, heads)), length)  # start of each (row, head)
        lead = b.reshape(lead, -1, heads, 1)
        flat = b("Add", lead, b.unsqueeze(index, 1))
        return b("Gather", b.reshape(x, -1, *tail), flat, axis=0)

    def on_grid(self, x: str) -> str:
        """[B, T, H, D] -> [B, H, cells, D], float32; cells without a token repeat some token."""
        b, layer = self.scope, self.layer
        width = layer.heads * layer.dim
        flat = b.reshape(x, -1, width)
        picked = b.reshape(b("Gather", flat, self._token_of_cell, axis=0), 0, 0, layer.heads, layer.dim)
        return layer.wide(b, b("Transpose", picked, perm=[0, 2, 1, 3]))

    @cached_property
    def _token_of_cell(self) -> str:
        """Row of the flattened tokens [B * T] for each cell, [B, cells]."""
        b = self.scope
        start = b("Mul", b.arange(self.chunks), self.layer.chunk)
        step = b("Add", b.unsqueeze(start, 1), b.unsqueeze(b("Sub", self.row, self.offset), 1))  # [B, chunks, R]
        step = b("Clip", b.reshape(step, 0, -1), 0, b("Squeeze", b("Sub", self.tokens, 1)))
        row_start = b.unsqueeze(b("Mul", b.arange(self.layer.batch), self.tokens), 1)
        return b("Add", step, row_start)

    def to_tokens(self, x: str) -> str:
        """[B, H, cells, D] -> [B, T, H, D]; padding becomes 0."""
        b, layer = self.scope, self.layer
        x = b("Transpose", x, perm=[0, 2, 1, 3])
        token = b.arange(self.tokens)
        cell = b("Sub", b("Add", token, self.offset), self.row_base)  # [B, T]
        cell = b("Min", cell, b("Sub", self.cells, 1))
        flat = b("Add", cell, b.unsqueeze(b("Mul", b.arange(layer.batch), self.cells), 1))
        picked = b("Gather", b.reshape(x, -1, layer.heads * layer.dim), flat, axis=0)
        picked = b.reshape(picked, 0, 0, layer.heads, layer.dim)
        real = b("Less", token, b.unsqueeze("new_tokens", 1))
        return b("Where", b.unsqueeze(real, 2, 3), picked, 0.0)
