"""The salient tokens: selection, part of the cache in the softmax, and the cache after the call."""

from __future__ import annotations

from functools import cached_property

from still_graphs.functions.builder import INT64, Scope
from still_kernels.hybrid_attention.body.grid import Grid
from still_kernels.hybrid_attention.body.layer import Layer


class Salient:
    """Selection and cache of a call.

    promoted: Grid chunks that begin within the call and so promote the second chunk before, bool [B, chunks].
    selection: Offsets of the salient tokens, ascending, int64 [B, HS, chunks, k]; "" with k = 0.
    next_selection: The same one chunk later, with a sliding window.
    """

    selection = next_selection = ""

    def __init__(self, scope: Scope, layer: Layer, grid: Grid, scores: str) -> None:
        self.b, self.layer, self.grid = scope, layer, grid
        self.folds = layer.overflow != "error" and layer.salient > 0
        self.promoted = self._promoted()
        if layer.salient:
            self._select(scores)

    def _promoted(self) -> str:
        """Grid chunks that begin within the call and so promote the second chunk before, bool [B, chunks]."""
        b, grid = self.b, self.grid
        begin = b("Mul", grid.number, self.layer.chunk)
        return b.all_of(
            b("GreaterOrEqual", begin, grid.past), b("Less", begin, grid.end), b("GreaterOrEqual", grid.number, 2)
        )

    def _select(self, scores: str) -> None:
        """The selection by scores [B, H, chunks, C], with one more chunk for a sliding window."""
        b, layer = self.b, self.layer
        if not layer.per_query_head:
            grouped = b.reshape(scores, 0, layer.kv_heads, layer.group, -1, layer.chunk)
            reduce = "ReduceMax" if layer.scope_kind == "kv_group_max" else "ReduceMean"
            scores = b(reduce, grouped, [2], keepdims=0)
        _, best = b.multi("TopK", scores, [layer.salient], out=2)  # the lower offset first if equal
        selection = b.multi("TopK", best, [layer.salient], out=2, largest=0)[0]
        if layer.local == "sliding":
            self.next_selection = b("Slice", selection, [1], [2**31], [2])
            selection = b("Slice", selection, [0], self.grid.chunks, [2])
        self.selection = selection

    def marked(self, selection: str, other: float, selected: float) -> str:
        """`selected` at the offsets of `selection` [B, HS, chunks, k], `other` elsewhere: float32 [B, HS, chunks, C]."""
        b, layer = self.b, self.layer
        shape = b.shape(layer.batch, layer.select_heads, self.grid.chunks, layer.chunk)
        values = b("Expand", selected, b("Shape", selection))
        return b("ScatterElements", b("Expand", other, shape), selection, values, axis=3)

    def rows(self, x: str) -> str:
        """Selected rows of x [B, HK, chunks * C, D], [B, HS, chunks, k, D]."""
        index = self._index
        return self.b("Gather", self.b.reshape(x, -1, self.layer.dim), index, axis=0)

    @cached_property
    def _index(self) -> str:
        b, layer, grid = self.b, self.layer, self.grid
        head = b.arange(b("Mul", layer.batch, layer.select_heads))
        source = b("Div", head, layer.group) if layer.per_query_head else head  # its key/value head, over all rows
        start = b("Add", b("Mul", b.unsqueeze(source, 1), grid.chunks), b.arange(grid.chunks))
        start = b.reshape(b("Mul", start, layer.chunk), -1, layer.select_heads, grid.chunks, 1)
        return b("Add", start, self.selection)

    def with_cache(self, past: str, rows: str) -> str:
        """cat([cached rows in use, new rows]) [B, HS, U + k * chunks, D]."""
        b, layer = self.b, self.layer
        used = layer.wide(b, past if self.folds else b("Slice", past, [0], self._used, [2]))
        flat = b.reshape(rows, 0, 0, -1, layer.dim)
        return b("Concat", used, flat, axis=2)

    @cached_property
    def _cached_rows(self) -> str:
        return self.layer.cached_rows(self.b)  # [B]

    @cached_property
    def _used(self) -> str:
        """U, cached rows in use by any row of the batch, at most N, int64 [1]; N if the overflow policy folds."""
        slots = self.b.dim("past_salient_key", 2)
        return slots if self.folds else self.b("Min", self.b("ReduceMax", self._cached_rows, keepdims=1), slots)

    @cached_property
    def _entered(self) -> str:
        """Cached and new rows that have been added by each grid chunk, bool [B, chunks, U + k * chunks]."""
        b, layer, grid = self.b, self.layer, self.grid
        used = self._used
        cached = b("Less", b.arange(used), b.unsqueeze(self._cached_rows, 1))  # [B, U]
        cached = b("Expand", b.unsqueeze(cached, 1), b.shape(layer.batch, grid.chunks, used))
        column = b("Div", b.arange(b("Mul", grid.chunks, layer.salient)), layer.salient)
        earlier = b("LessOrEqual", column, b.unsqueeze(b.arange(grid.chunks), 1))  # [chunks, k * chunks]
        fresh = b("And", earlier, b.unsqueeze(b("Gather", self.promoted, column, axis=1), 1))
        return b("Concat", cached, fresh, axis=2)

    @cached_property
    def _ring(self) -> str:
        """Chunks that fit into the cache of a folding policy, int64 [1]: rank r of chunk c is in slot k * (c mod it) + r."""
        return self.b("Div", self.b.dim("past_salient_key", 2), self.layer.salient)

    @cached_property
    def _first(self) -> str:
        """The oldest chunk that stays in the cache of a folding policy by each grid chunk, int64 [B, chunks]."""
        b = self.b
        come = b("CumSum", b.cast(self.promoted, INT64), 1)
        come = b("Add", b.unsqueeze(b("Div", self._cached_rows, self.layer.salient), 1), come)
        return b("Sub", come, self._ring)

    @cached_property
    def _age(self) -> str:
        """Chunk of each cached and new row, int64 [B, 1, N + k * chunks]."""
        b, k = self.b, self.layer.salient
        lane, ring = b("Div", b.arange(self._used), k), b("Max", self._ring, 1)
        last = b("Sub", b.unsqueeze(b("Div", self._cached_rows, k), 1), 1)  # [B, 1]
        cached = b("Add", lane, b("Mul", b("Div", b("Sub", last, lane), ring), ring))  # the latest written to a slot
        column = b("Div", b.arange(b("Mul", self.grid.chunks, k)), k)
        fresh = b("Gather", b("Sub", self.grid.number, 2), column, axis=1)
        return b.unsqueeze(b("Concat", cached, fresh, axis=1), 1)

    def folded(self) -> str:
        """Cached and new rows that leave the cache when each grid chunk promotes, bool [B, chunks, N + k * chunks]."""
        b = self.b
        leaves = b("Equal", self._age, b.unsqueeze(b("Sub", self._first, 1), 2))
        return b.all_of(self._entered, leaves, b.unsqueeze(self.promoted, 2))

    def mask(self) -> str:
        """Mask of cached and new rows for each grid chunk, [B, 1, 1, chunks, 1, U + k * chunks]."""
        b, visible = self.b, self._entered
        if self.folds:
            visible = b("And", visible, b("GreaterOrEqual", self._age, b.unsqueeze(self._first, 2)))
        return self.layer.mask(b, b.unsqueeze(visible, 1, 2, 4))

    def write_present(self, keys: str, values: str, outputs: dict[str, str]) -> None:
        """Write the rows of promoted chunks to their slots; the rest of the cache is unchanged."""
        b, layer, grid = self.b, self.layer, self.grid
        if not layer.salient:
            for name in ("salient_key", "salient_value"):
                b("Identity", f"past_{name}", out=outputs[f"present_{name}"])
            return
        # Rows come from the concatenation with the cache, so an in-place write follows the read of the cache.
        count = b("Mul", grid.chunks, layer.salient)
        chunk, taken = b("Sub", grid.number, 2), self.promoted  # [B, chunks]
        if self.folds:
            last = b("Gather", self._first, b("Sub", grid.chunks, 1), axis=1)  # [B, 1]
            taken = b("And", taken, b("GreaterOrEqual", chunk, last))
            chunk = b("Mod", chunk, b("Max", self._ring, 1))
        rank = b("Mod", b.arange(count), layer.salient)
        column = b("Div", b.arange(count), layer.salient)
        slots = b("Add", b("Gather", b("Mul", chunk, layer.salient), column, axis=1), rank)  # [B, k * chunks]
        where = b("Transpose", b("NonZero", b("Gather", taken, column, axis=1)), perm=[1, 0])  # [M, 2]
        slot = b.reshape(b("GatherND", slots, where), -1, 1, 1)
        shape = b.shape(b.dim(where, 0), layer.select_heads, 1)
        row, new_row = (b.reshape(b("Gather", where, part, axis=1), -1, 1, 1) for part in (0, 1))
        head = b.reshape(b.arange(layer.select_heads), 1, -1, 1)
        row, head, new_row, slot = (b("Expand", part, shape) for part in (row, head, new_row, slot))
        where, index = (b("Concat", row, head, part, axis=2) for part in (new_row, slot))
        for name, entries in (("salient_key", keys), ("salient_value", values)):
            rows = b("Slice", entries, b("Neg", count), [2**31], [2])  # [B, HS, k * chunks, D]
            picked = layer.narrow(b, b("GatherND", rows, where))
            b("ScatterND", f"past_{name}", index, picked, out=outputs[f"present_{name}"])
