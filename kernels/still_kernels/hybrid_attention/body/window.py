"""The window of each grid chunk: its columns, its scores, its part of the softmax, the rings after the call."""

from __future__ import annotations

from still_graphs.functions.builder import BOOL, Scope
from still_kernels.hybrid_attention.body.grid import Grid
from still_kernels.hybrid_attention.body.layer import Layer
from still_kernels.hybrid_attention.body.saliency import self_saliency
from still_kernels.hybrid_attention.body.salient import Salient


class Window:
    """Grid chunk j reads aligned chunks j + 1 and j + 2: columns 0 ... 2C - 1.

    length: Rows of `keys` and `values`, cat([ring, new tokens, a row of zeros]), [1].
    """

    def __init__(self, scope: Scope, layer: Layer, grid: Grid) -> None:
        self.b, self.layer, self.grid = scope, layer, grid
        self.length = scope("Add", grid.tokens, 2 * layer.chunk + 1)
        self.keys = self._joined("past_window_key", "key")
        self.values = self._joined("past_window_value", "value")

    def _joined(self, ring: str, fresh: str) -> str:
        """[B, HK, 2C + T + 1, D]: ring, new tokens, and a row of zeros for empty positions."""
        b, layer = self.b, self.layer
        zeros = layer.narrow(b, b("Expand", 0.0, b.shape(layer.batch, layer.kv_heads, 1, layer.dim)))
        return b("Concat", ring, b("Transpose", fresh, perm=[0, 2, 1, 3]), zeros, axis=2)

    def sources(self) -> tuple[str, str]:
        """Rows of `keys` in the windows, [B, chunks * 2C], and in the chunks that may be promoted, [B, chunks * C]."""
        b, grid, chunk = self.b, self.grid, self.layer.chunk
        corner = b.unsqueeze(b("Mul", b("Add", b.arange(grid.chunks), 1), chunk), 1)
        window = b.reshape(b("Add", corner, b.arange(2 * chunk)), -1)
        in_window = b("Gather", grid.source, window, axis=1)
        return in_window, b("Slice", grid.source, [0], b("Mul", grid.chunks, chunk), [1])

    def pick(self, both: str, index: str) -> str:
        """Rows of `keys` or `values` at `index` [B, I], [B, HK, I, D] in float32."""
        layer = self.layer
        return layer.wide(self.b, self.grid.gather(both, index, layer.kv_heads, self.length, layer.dim))

    def number_columns(self) -> None:
        """Set columns, rows and chunks in the shapes of logits."""
        b, grid = self.b, self.grid
        self.column = b.arange(2 * self.layer.chunk)
        self.row = b.unsqueeze(b.unsqueeze(grid.row, 1), 3)  # [B, 1, R, 1]
        self.number = b.reshape(grid.number, 0, -1, 1, 1)  # [B, chunks, 1, 1]
        before = b("Mul", b("Sub", self.number, 1), self.layer.chunk)
        self.exists = b("GreaterOrEqual", b("Add", self.column, before), 0)

    def scores(self, logits: str) -> str:
        """Self-saliency of the grid's tokens, [B, H, cells]."""
        b, layer, grid = self.b, self.layer, self.grid
        chunk = layer.chunk
        own_column = b("Add", self.row, chunk)
        others = b.all_of(
            b("Greater", self.column, self.row), b("Less", self.column, own_column), self.exists
        )  # [B, chunks, R, 2C]
        lead = b.shape(layer.batch, layer.kv_heads, layer.group, grid.chunks, grid.rows, 1)
        index = b("Expand", b.reshape(own_column, -1, 1, 1, 1, grid.rows, 1), lead)
        own = b("GatherElements", logits, index, axis=-1)
        alone = b("Equal", b("Add", b("Mul", self.number, chunk), self.row), 0)  # position 0
        axes = (1, 2)
        score = self_saliency(
            b,
            layer,
            logits,
            own,
            b.unsqueeze(others, *axes),
            b.unsqueeze(alone, *axes),
            b.unsqueeze(b("Equal", self.column, own_column), *axes),
            b("Equal", b("Mod", self.column, chunk), chunk - 1),
        )
        return b.reshape(score, 0, layer.heads, -1)

    def local_mask(self, salient: Salient) -> tuple[str, str]:
        """Columns of the local softmax, and those of the linear part ("" with chunks), bool [B, 1, 1, chunks, R, 2C].

        Phantom keys are the zero rows before position 0.
        """
        b, layer = self.b, self.layer
        visible = b("LessOrEqual", self.column, b("Add", self.row, layer.chunk))
        if not layer.phantom:
            visible = b("And", visible, self.exists)
        visible = b.unsqueeze(visible, 1, 2)
        if layer.local == "chunked":
            return visible, ""
        # A token that left the sliding window but not yet the ring: in the softmax if selected, else linear.
        causal = visible
        oldest = b("Add", b.unsqueeze(self.row, 1, 2), layer.chunk - layer.window)
        visible = b("And", causal, b("Greater", self.column, oldest))
        if layer.salient:
            chosen = salient.marked(salient.next_selection, 0.0, 1.0)  # of the previous chunk, [B, HS, chunks, C]
            chosen = b("Pad", chosen, [0, 0, 0, 0, 0, 0, 0, layer.chunk], 0.0)
            group = layer.group if layer.per_query_head else 1
            chosen = b.reshape(chosen, 0, layer.kv_heads, group, -1, 1, 2 * layer.chunk)
            visible = b("Or", visible, b("And", causal, b.cast(chosen, BOOL)))
        return visible, b("And", causal, b("Not", visible))

    def join_scores(self, scores: str) -> None:
        """The ring's scores followed by the grid's [B, H, cells]: [B, H, 2C + cells]."""
        b = self.b
        self.all_scores = b("Concat", "past_window_score", scores, axis=2)
        self.score_length = b("Add", self.grid.cells, 2 * self.layer.chunk)

    def _score_source(self, position: str, seen: str) -> str:
        """Column of `position` [B, x] in cat([ring, grid])."""
        b, grid, chunk = self.b, self.grid, self.layer.chunk
        ahead = b("Mul", b("Sub", b("Div", position, chunk), grid.first), grid.rows)
        cell = b("Sub", b("Add", ahead, b("Mod", position, chunk)), grid.row_base)
        cell = b("Clip", cell, 0, b("Squeeze", b("Sub", grid.cells, 1)))
        return b("Where", seen, b("Mod", position, 2 * chunk), b("Add", cell, 2 * chunk))

    def old_scores(self) -> str:
        """Scores of the aligned chunks that may be promoted, [B, H, chunks, C]; one more chunk for a sliding window."""
        b, layer, grid = self.b, self.layer, self.grid
        chunks = grid.chunks if layer.local == "chunked" else b("Add", grid.chunks, 1)
        end = b("Mul", chunks, layer.chunk)
        position = b("Slice", grid.position, [0], end, [1])
        seen = b("Slice", grid.seen, [0], end, [1])
        picked = grid.gather(self.all_scores, self._score_source(position, seen), layer.heads, self.score_length)
        return b.reshape(picked, 0, 0, -1, layer.chunk)

    def write_present(self, outputs: dict[str, str]) -> None:
        """Rings after the call: each slot has its latest position, or its old value."""
        b, layer, grid = self.b, self.layer, self.grid
        slots = 2 * layer.chunk
        slot = b.arange(slots)
        last = b("Sub", grid.end, 1)
        position = b("Sub", last, b("Mod", b("Sub", last, slot), slots))  # [B, 2C]
        old = b("Less", position, grid.past)
        source = b("Where", old, slot, b("Add", b("Sub", position, grid.past), slots))
        for name, both in (("window_key", self.keys), ("window_value", self.values)):
            rows = grid.gather(both, source, layer.kv_heads, self.length, layer.dim)
            b("Identity", rows, out=outputs[f"present_{name}"])
        source = b("Where", old, slot, self._score_source(position, old))
        scores = grid.gather(self.all_scores, source, layer.heads, self.score_length)
        b("Identity", scores, out=outputs["present_window_score"])
