"""The general branch: any number of new tokens, any split, ragged rows; vectorised over chunks.

The same plan as the PyTorch form: each row's tokens lie on a grid of `chunks` chunks that starts at its current chunk
c0 = past_length // C; keys come from chunks c0-2 on; aligned chunk j (absolute c0-2+j) is promoted for grid chunk j.
Query heads stay beside their key/value head, [B, HK, G, ...]: MatMul broadcasts keys over G without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from still_graphs.functions.builder import BOOL, FLOAT, INT64, Scope
from still_graphs.functions.counts import checked_counts
from still_graphs.functions.hybrid_attention.features import features
from still_graphs.functions.hybrid_attention.layer import Layer
from still_graphs.functions.hybrid_attention.overflow import compete
from still_graphs.functions.hybrid_attention.saliency import self_saliency


@dataclass
class Grid:
    """Index tensors of a call. Shapes: R rows of a grid chunk (C, or 1 when T = 1), A = (chunks + 2) * C aligned positions."""

    tokens: str  # T, [1]
    chunks: str  # [1]
    rows: str  # R, [1]
    cells: str  # chunks * R, [1]
    first: str  # c0, [B, 1]
    offset: str  # past_length % C, [B, 1]
    past: str  # past_length, [B, 1]
    end: str  # past_length + new_tokens, [B, 1]
    row: str  # offset of each grid row in its chunk, [B, R]
    row_base: str  # its first element where R = 1, else 0, [B, 1]
    number: str  # absolute grid chunk, [B, chunks]
    position: str  # aligned positions, [B, A]
    seen: str  # position < past_length, [B, A]
    source: str  # row of the aligned position in cat([ring, new, zero]), [B, A]


def make_grid(b: Scope, layer: Layer) -> Grid:
    chunk, tokens = layer.chunk, b.dim("query", 1)
    past, new = checked_counts(b, tokens)
    first, offset = b("Div", past, chunk), b("Mod", past, chunk)
    end = b("Add", past, new)
    single = b("Equal", tokens, [1])
    need = b("Div", b.total(offset, new, chunk - 1), chunk)
    chunks = b.reshape(b("Max", b("ReduceMax", need, keepdims=0), 1), 1)
    rows = b("Where", single, [1], [chunk])
    row_base = b("Mul", offset, b.cast(single, INT64))
    row = b("Add", row_base, b.arange(rows))
    number = b("Add", first, b.arange(chunks))
    position = b("Add", b("Mul", b("Sub", first, 2), chunk), b.arange(b("Mul", b("Add", chunks, 2), chunk)))
    seen = b("Less", position, past)
    ring = b("Mod", position, 2 * chunk)
    fresh = b.total(b("Sub", position, past), 2 * chunk)
    zero_row = b("Add", tokens, 2 * chunk)
    oldest = b("Max", b("Sub", past, 2 * chunk), 0)
    held = b.all_of(b("GreaterOrEqual", position, oldest), b("Less", position, end))
    source = b("Where", held, b("Where", seen, ring, fresh), zero_row)
    return Grid(
        tokens=tokens,
        chunks=chunks,
        rows=rows,
        cells=b("Mul", chunks, rows),
        first=first,
        offset=offset,
        past=past,
        end=end,
        row=row,
        row_base=row_base,
        number=number,
        position=position,
        seen=seen,
        source=source,
    )


class General:
    """Writes the branch; `write` returns the names of the outputs by output name."""

    def __init__(self, scope: Scope, layer: Layer) -> None:
        self.b, self.layer = scope, layer
        self.grid = make_grid(scope, layer)
        self.folds = layer.overflow != "error" and layer.salient > 0
        heads = (layer.kv_heads, layer.group) if layer.weight_heads > 1 else (1, 1)
        self.weight_k = scope.reshape(layer.weights["k"], *heads, layer.dim, -1)

    # Layout helpers.

    def gather(self, x: str, index: str, heads: int, length: str, *tail: str | int) -> str:
        """Rows of x [B, h, S, ...tail] at index [B, I], the same for all heads: [B, h, I, ...tail]."""
        b = self.b
        lead = b("Mul", b.arange(b("Mul", self.layer.batch, heads)), length)  # start of each (row, head)
        lead = b.reshape(lead, -1, heads, 1)
        flat = b("Add", lead, b.unsqueeze(index, 1))
        return b("Gather", b.reshape(x, -1, *tail), flat, axis=0)

    def on_grid(self, x: str) -> str:
        """[B, T, H, D] -> [B, H, cells, D], float32; cells without a token repeat some token."""
        b, layer = self.b, self.layer
        width = layer.heads * layer.dim
        flat = b.reshape(x, -1, width)
        picked = b.reshape(b("Gather", flat, self.token_of_cell(), axis=0), 0, 0, layer.heads, layer.dim)
        return layer.wide(b, b("Transpose", picked, perm=[0, 2, 1, 3]))

    def token_of_cell(self) -> str:
        """Row of the flattened tokens [B * T] for each cell, [B, cells]."""
        if not hasattr(self, "_token_of_cell"):
            b, grid, chunk = self.b, self.grid, self.layer.chunk
            start = b("Mul", b.arange(grid.chunks), chunk)
            step = b("Add", b.unsqueeze(start, 1), b.unsqueeze(b("Sub", grid.row, grid.offset), 1))  # [B, chunks, R]
            step = b("Clip", b.reshape(step, 0, -1), 0, b("Squeeze", b("Sub", grid.tokens, 1)))
            row_start = b.unsqueeze(b("Mul", b.arange(self.layer.batch), grid.tokens), 1)
            self._token_of_cell = b("Add", step, row_start)
        return self._token_of_cell

    def joined(self, ring: str, fresh: str) -> str:
        """[B, HK, 2C + T + 1, D]: ring, new tokens, and a row of zeros for positions that hold nothing."""
        b, layer = self.b, self.layer
        zeros = layer.narrow(b, b("Expand", 0.0, b.shape(layer.batch, layer.kv_heads, 1, layer.dim)))
        return b("Concat", ring, b("Transpose", fresh, perm=[0, 2, 1, 3]), zeros, axis=2)

    # The parts.

    def write(self, outputs: dict[str, str]) -> None:
        """Write all nodes; `outputs` maps each output of the op to the name it must get."""
        b, layer, grid = self.b, self.layer, self.grid
        chunk = layer.chunk
        query = self.on_grid("query")  # [B, H, cells, D]
        scaled = b("Mul", query, layer.weights["scale"])
        length = b("Add", grid.tokens, 2 * chunk + 1)
        both_k, both_v = self.joined("past_window_key", "key"), self.joined("past_window_value", "value")

        # Window of each grid chunk: aligned chunks j+1 and j+2.
        corner = b.unsqueeze(b("Mul", b("Add", b.arange(grid.chunks), 1), chunk), 1)
        window = b.reshape(b("Add", corner, b.arange(2 * chunk)), -1)
        window_source = b("Gather", grid.source, window, axis=1)  # [B, chunks * 2C]
        candidate_source = b("Slice", grid.source, [0], b("Mul", grid.chunks, chunk), [1])  # [B, chunks * C]

        def pick(both: str, index: str) -> str:
            return layer.wide(b, self.gather(both, index, layer.kv_heads, length, layer.dim))

        tile = (0, 0, 1, grid.chunks, 2 * chunk, -1)
        k_window = b.reshape(pick(both_k, window_source), *tile)  # [B, HK, 1, chunks, 2C, D]
        v_window = b.reshape(pick(both_v, window_source), *tile)
        k_old = pick(both_k, candidate_source)  # [B, HK, chunks * C, D]
        v_old = pick(both_v, candidate_source)

        split = (0, layer.kv_heads, layer.group, grid.chunks, grid.rows, -1)
        q_split = b.reshape(scaled, *split)
        logits = b("MatMul", q_split, b("Transpose", k_window, perm=[0, 1, 2, 3, 5, 4]))  # [B, HK, G, chunks, R, 2C]

        self.column = b.arange(2 * chunk)
        self.row = b.unsqueeze(b.unsqueeze(grid.row, 1), 3)  # [B, 1, R, 1]
        number = b.reshape(grid.number, 0, -1, 1, 1)  # [B, chunks, 1, 1]
        self.exists = b("GreaterOrEqual", b("Add", self.column, b("Mul", b("Sub", number, 1), chunk)), 0)
        scores = self.scores(logits, number)  # [B, H, cells]
        all_scores, score_length = self.all_scores(scores)
        old_scores = self.old_scores(all_scores, score_length)  # [B, H, chunks (+ 1), C]

        promoted = self.promoted()  # [B, chunks]
        selection = self.select(old_scores)
        phi_q = features(b, layer, query, layer.weights["q"], (0, layer.heads, -1))
        phi_q = b.reshape(phi_q, *split)
        keys = values = ""
        folded = None
        if layer.salient:
            keys = self.with_cache("past_salient_key", self.salient_rows(k_old, selection))
            values = self.with_cache("past_salient_value", self.salient_rows(v_old, selection))
            if self.folds:
                new_scores = b("GatherElements", b("Slice", self.ranked, [0], grid.chunks, [2]), selection, axis=3)
                self.competition = compete(b, layer, promoted, new_scores, grid.chunks)
                self.new_scores = new_scores
                folded = self.folded(keys, values)
        kv_state, z_state = self.promote(k_old, v_old, promoted, selection, folded, outputs)
        linear = b("MatMul", phi_q, kv_state)
        mass = b("MatMul", phi_q, b.unsqueeze(z_state, 5))

        local = self.local_mask()
        if layer.local == "sliding":
            lead = (0, layer.kv_heads, layer.group, -1)
            flat = b.reshape(k_window, 0, 0, 1, -1, layer.dim)
            phi_window = b.reshape(features(b, layer, flat, self.weight_k, lead), 0, 0, 0, grid.chunks, 2 * chunk, -1)
            similarity = b("MatMul", phi_q, b("Transpose", phi_window, perm=[0, 1, 2, 3, 5, 4]))
            similarity = b("Where", self.linear_window, similarity, 0.0)
            linear = b("Add", linear, b("MatMul", similarity, v_window))
            mass = b("Add", mass, b("ReduceSum", similarity, [-1]))
        own_max, weight, value = self.soft(logits, layer.mask(b, local), v_window)
        if layer.salient:
            mask = self.salient_mask(promoted)
            q_rows = b.reshape(scaled, 0, layer.select_heads, -1, layer.dim)  # heads of one selection side by side
            logits = b("MatMul", q_rows, b("Transpose", keys, perm=[0, 1, 3, 2]))
            shape = (0, layer.select_heads, -1, grid.chunks, grid.rows, b.dim(logits, 3))
            logits = b("Add", b.reshape(logits, *shape), mask)
            p = b("Softmax", logits, axis=-1)
            top = b.reshape(b("ReduceMax", logits, [-1]), *split)
            share = b.reshape(b("ReduceMax", p, [-1]), *split)
            by_cache = b("MatMul", b.reshape(p, 0, 0, -1, b.dim(p, 5)), values)
            by_cache = b.reshape(by_cache, *split)
            row_max = b("Max", own_max, top)
            weight = b("Div", b("Exp", b("Sub", own_max, row_max)), weight)
            cache_weight = b("Div", b("Exp", b("Sub", top, row_max)), share)
            numerator = b("Add", b("Mul", weight, value), b("Mul", cache_weight, by_cache))
            denominator = b("Add", weight, cache_weight)
        else:
            denominator = b("Reciprocal", weight)
            numerator = b("Mul", denominator, value)
        self.finish(numerator, denominator, linear, mass, split, outputs)
        self.present_window(both_k, both_v, all_scores, length, score_length, outputs)
        self.present_cache(keys, values, promoted, outputs)

    def soft(self, logits: str, mask: str, value: str) -> tuple[str, str, str]:
        """Softmax pieces: true maximum, largest probability (1 / sum of e^(s - max)), normalised mix of values."""
        b = self.b
        logits = b("Add", logits, mask)
        p = b("Softmax", logits, axis=-1)
        return b("ReduceMax", logits, [-1]), b("ReduceMax", p, [-1]), b("MatMul", p, value)

    def scores(self, logits: str, number: str) -> str:
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
        alone = b("Equal", b("Add", b("Mul", number, chunk), self.row), 0)  # position 0
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

    def local_mask(self) -> str:
        """Columns of the local softmax, bool [B, 1, 1, chunks, R, 2C]; phantom keys are the zero rows before position 0."""
        b, layer = self.b, self.layer
        visible = b("LessOrEqual", self.column, b("Add", self.row, layer.chunk))
        if not layer.phantom:
            visible = b("And", visible, self.exists)
        visible = b.unsqueeze(visible, 1, 2)
        if layer.local == "chunked":
            return visible
        # A token that left the sliding window but not yet the ring: in the softmax if selected, else linear.
        causal = visible
        oldest = b("Add", b.unsqueeze(self.row, 1, 2), layer.chunk - layer.window)
        visible = b("And", causal, b("Greater", self.column, oldest))
        if layer.salient:
            chosen = self.marked(self.next_selection, 0.0, 1.0)  # of the previous chunk, [B, HS, chunks, C]
            chosen = b("Pad", chosen, [0, 0, 0, 0, 0, 0, 0, layer.chunk], 0.0)
            group = layer.group if layer.per_query_head else 1
            chosen = b.reshape(chosen, 0, layer.kv_heads, group, -1, 1, 2 * layer.chunk)
            visible = b("Or", visible, b("And", causal, b.cast(chosen, BOOL)))
        self.linear_window = b("And", causal, b("Not", visible))
        return visible

    def all_scores(self, scores: str) -> tuple[str, str]:
        """cat([ring's scores, grid's scores]) [B, H, 2C + cells] and its length [1]."""
        b = self.b
        return b("Concat", "past_window_score", scores, axis=2), b("Add", self.grid.cells, 2 * self.layer.chunk)

    def score_source(self, position: str, seen: str) -> str:
        """Column of `position` [B, x] in cat([ring, grid])."""
        b, grid, chunk = self.b, self.grid, self.layer.chunk
        ahead = b("Mul", b("Sub", b("Div", position, chunk), grid.first), grid.rows)
        cell = b("Sub", b("Add", ahead, b("Mod", position, chunk)), grid.row_base)
        cell = b("Clip", cell, 0, b("Squeeze", b("Sub", grid.cells, 1)))
        return b("Where", seen, b("Mod", position, 2 * chunk), b("Add", cell, 2 * chunk))

    def old_scores(self, all_scores: str, length: str) -> str:
        """Scores of the aligned chunks that may be promoted, [B, H, chunks, C]; one more chunk for a sliding window."""
        b, layer, grid = self.b, self.layer, self.grid
        chunks = grid.chunks if layer.local == "chunked" else b("Add", grid.chunks, 1)
        end = b("Mul", chunks, layer.chunk)
        position = b("Slice", grid.position, [0], end, [1])
        seen = b("Slice", grid.seen, [0], end, [1])
        picked = self.gather(all_scores, self.score_source(position, seen), layer.heads, length)
        return b.reshape(picked, 0, 0, -1, layer.chunk)

    def promoted(self) -> str:
        """Grid chunks that begin within the call and so promote the chunk two before, bool [B, chunks]."""
        b, grid = self.b, self.grid
        begin = b("Mul", grid.number, self.layer.chunk)
        return b.all_of(
            b("GreaterOrEqual", begin, grid.past), b("Less", begin, grid.end), b("GreaterOrEqual", grid.number, 2)
        )

    def select(self, scores: str) -> str:
        """Offsets of the salient tokens, ascending, int64 [B, HS, chunks, k]; "" with k = 0."""
        b, layer = self.b, self.layer
        if not layer.salient:
            return ""
        self.ranked = scores
        if not layer.per_query_head:
            grouped = b.reshape(scores, 0, layer.kv_heads, layer.group, -1, layer.chunk)
            reduce = "ReduceMax" if layer.scope_kind == "kv_group_max" else "ReduceMean"
            self.ranked = b(reduce, grouped, [2], keepdims=0)
        _, best = b.multi("TopK", self.ranked, [layer.salient], out=2)  # of equals the lower offset
        selection = b.multi("TopK", best, [layer.salient], out=2, largest=0)[0]
        if layer.local == "sliding":
            self.next_selection = b("Slice", selection, [1], [2**31], [2])
            selection = b("Slice", selection, [0], self.grid.chunks, [2])
        return selection

    def folded(self, keys: str, values: str) -> tuple[str, str]:
        """What entries that leave the cache add to S [B, HK, G, chunks, F, D] and z [B, HK, G, chunks, F, 1]."""
        b, layer, grid = self.b, self.layer, self.grid
        leaves = b.cast(self.competition.folded, FLOAT)  # [B, HS, chunks, M]
        # Each entry leaves once, at most k a chunk.
        most = b("Mul", grid.chunks, layer.salient)
        _, index = b.multi("TopK", b("ReduceMax", leaves, [2], keepdims=0), most, out=2)  # [B, HS, Q]
        group = layer.group if layer.per_query_head else 1

        def pick(x: str) -> str:
            rows = b("GatherND", x, b.unsqueeze(index, 3), batch_dims=2)
            return b.reshape(rows, 0, layer.kv_heads, group, -1, layer.dim)

        phi = features(b, layer, pick(keys), self.weight_k, (0, layer.kv_heads, layer.group, -1))
        phi = b.unsqueeze(b("Transpose", phi, perm=[0, 1, 2, 4, 3]), 3)  # [B, HK, G, 1, F, Q]
        shape = b.shape(layer.batch, layer.select_heads, grid.chunks, most)
        when = b("GatherElements", leaves, b("Expand", b.unsqueeze(index, 2), shape), axis=3)
        when = b.reshape(when, 0, layer.kv_heads, group, grid.chunks, 1, -1)
        phi = b("Mul", phi, when)
        return b("MatMul", phi, b.unsqueeze(pick(values), 3)), b("ReduceSum", phi, [-1])

    def promote(
        self,
        k: str,
        v: str,
        promoted: str,
        selection: str,
        folded: tuple[str, str] | None,
        outputs: dict[str, str],
    ) -> tuple[str, str]:
        """S and z that each grid chunk sees, [B, HK, G, chunks, F, D] and [B, HK, G, chunks, F]; the last become present."""
        b, layer, grid = self.b, self.layer, self.grid
        chunk = layer.chunk
        enters = b.cast(b.reshape(promoted, 0, 1, -1, 1), FLOAT)  # [B, 1, chunks, 1]
        if selection:
            enters = b("Mul", self.marked(selection, 1.0, 0.0), enters)  # [B, HS, chunks, C]
            lead: tuple[str | int, ...] = (0, layer.kv_heads, layer.group if layer.per_query_head else 1)
        else:
            enters = b("Expand", enters, b.shape(layer.batch, 1, grid.chunks, chunk))
            lead = (0, 1, 1)
        enters = b.reshape(enters, *lead, grid.chunks, chunk, 1)
        phi = features(b, layer, b.unsqueeze(k, 2), self.weight_k, (0, layer.kv_heads, layer.group, -1))
        phi = b.reshape(phi, 0, 0, 0, grid.chunks, chunk, -1)  # [B, HK, G, chunks, C, F]
        phi = b("Transpose", phi, perm=[0, 1, 2, 3, 5, 4])
        v_split = b.reshape(v, 0, 0, 1, grid.chunks, chunk, -1)
        delta = b("MatMul", phi, b("Mul", enters, v_split))  # [B, HK, G, chunks, F, D]
        mass = b("MatMul", phi, enters)  # [B, HK, G, chunks, F, 1]
        if folded:
            delta, mass = b("Add", delta, folded[0]), b("Add", mass, folded[1])
        index = b.arange(grid.chunks)
        earlier = b.cast(b("GreaterOrEqual", b.unsqueeze(index, 1), index), FLOAT)  # [chunks, chunks]

        def prefix(x: str, past: str, shape: tuple[int, ...], out: str) -> str:
            flat = b.reshape(x, 0, layer.heads, grid.chunks, -1)
            start = b.reshape(past, 0, 0, 1, -1)
            sums = b.reshape(b("Add", b("MatMul", earlier, flat), start), 0, layer.heads, grid.chunks, *shape)
            last = b("Squeeze", b("Sub", grid.chunks, 1))
            b("Gather", sums, last, axis=2, out=out)
            return b.reshape(sums, 0, layer.kv_heads, layer.group, grid.chunks, *shape)

        kv = prefix(delta, "past_kv_state", (layer.features, layer.dim), outputs["present_kv_state"])
        z = prefix(mass, "past_z_state", (layer.features,), outputs["present_z_state"])
        return kv, z

    def marked(self, selection: str, other: float, selected: float) -> str:
        """`selected` at the offsets of `selection` [B, HS, chunks, k], `other` elsewhere: float32 [B, HS, chunks, C]."""
        b, layer = self.b, self.layer
        shape = b.shape(layer.batch, layer.select_heads, self.grid.chunks, layer.chunk)
        values = b("Expand", selected, b("Shape", selection))
        return b("ScatterElements", b("Expand", other, shape), selection, values, axis=3)

    def salient_rows(self, x: str, selection: str) -> str:
        """Rows of x [B, HK, chunks * C, D] that are selected, [B, HS, chunks, k, D]."""
        b, layer, grid = self.b, self.layer, self.grid
        if not hasattr(self, "_salient_index"):
            heads = b("Mul", layer.batch, layer.select_heads)
            head = b.arange(heads)
            source = b("Div", head, layer.group) if layer.per_query_head else head  # its key/value head, over all rows
            start = b("Add", b("Mul", b.unsqueeze(source, 1), grid.chunks), b.arange(grid.chunks))
            start = b.reshape(b("Mul", start, layer.chunk), -1, layer.select_heads, grid.chunks, 1)
            self._salient_index = b("Add", start, selection)
        return b("Gather", b.reshape(x, -1, layer.dim), self._salient_index, axis=0)

    def with_cache(self, past: str, rows: str) -> str:
        """cat([cached rows in use, new rows]) [B, HS, U + k * chunks, D]."""
        b, layer = self.b, self.layer
        used = layer.wide(b, past if self.folds else b("Slice", past, [0], self.used(), [2]))
        flat = b.reshape(rows, 0, 0, -1, layer.dim)
        return b("Concat", used, flat, axis=2)

    def used(self) -> str:
        """U: cached rows that some row of the batch has, at most N, int64 [1]."""
        if not hasattr(self, "_used"):
            b = self.b
            self._held = self.layer.held_rows(b)  # [B]
            most = b("ReduceMax", self._held, keepdims=1)
            self._used = b("Min", most, b.dim("past_salient_key", 2))
        return self._used

    def salient_mask(self, promoted: str) -> str:
        """Which cached and new rows each grid chunk sees, as a mask [B, 1, 1, chunks, 1, U + k * chunks]."""
        b, layer, grid = self.b, self.layer, self.grid
        if self.folds:
            group = layer.group if layer.per_query_head else 1
            entries = b.dim(self.competition.visible, 3)
            visible = b.reshape(self.competition.visible, 0, layer.kv_heads, group, grid.chunks, 1, entries)
            # Heads as the salient logits have them: [B, HS, query heads of one selection, chunks, R, M].
            return layer.mask(b, b.reshape(visible, 0, layer.select_heads, 1, grid.chunks, 1, entries))
        used = self.used()
        cached = b("Less", b.arange(used), b.unsqueeze(self._held, 1))  # [B, U]
        cached = b("Expand", b.unsqueeze(cached, 1), b.shape(layer.batch, grid.chunks, used))
        column = b("Div", b.arange(b("Mul", grid.chunks, layer.salient)), layer.salient)
        earlier = b("LessOrEqual", column, b.unsqueeze(b.arange(grid.chunks), 1))  # [chunks, k * chunks]
        fresh = b("And", earlier, b.unsqueeze(b("Gather", promoted, column, axis=1), 1))
        visible = b("Concat", cached, fresh, axis=2)  # [B, chunks, U + k * chunks]
        return layer.mask(b, b.unsqueeze(visible, 1, 2, 4))

    def finish(
        self,
        numerator: str,
        denominator: str,
        linear: str,
        mass: str,
        split: tuple[str | int, ...],
        outputs: dict[str, str],
    ) -> None:
        """Mix, and bring the grid's cells back to tokens; padding becomes 0."""
        b, layer, grid = self.b, self.layer, self.grid
        if layer.factored:
            factor = b.reshape("window_factor", 1, layer.kv_heads, layer.group, 1, 1, 1)
            numerator, denominator = b("Mul", factor, numerator), b("Mul", factor, denominator)
        if layer.gated:
            linear = b("Mul", b.reshape(self.on_grid("gate"), *split), linear)
        total = b("Add", b("Add", denominator, mass), layer.mix_epsilon)
        mixed = b("Div", b("Add", numerator, linear), total)
        mixed = b("Transpose", b.reshape(mixed, 0, layer.heads, -1, layer.dim), perm=[0, 2, 1, 3])
        token = b.arange(grid.tokens)
        cell = b("Sub", b("Add", token, grid.offset), grid.row_base)  # [B, T]
        cell = b("Min", cell, b("Sub", grid.cells, 1))
        flat = b("Add", cell, b.unsqueeze(b("Mul", b.arange(layer.batch), grid.cells), 1))
        picked = b("Gather", b.reshape(mixed, -1, layer.heads * layer.dim), flat, axis=0)
        picked = b.reshape(picked, 0, 0, layer.heads, layer.dim)
        real = b("Less", token, b.unsqueeze("new_tokens", 1))
        result = b("Where", b.unsqueeze(real, 2, 3), picked, 0.0)
        b("Cast", result, to=layer.dtype, out=outputs["output"])

    def present_window(
        self, both_k: str, both_v: str, all_scores: str, length: str, score_length: str, outputs: dict[str, str]
    ) -> None:
        """Rings after the call: each slot holds its latest position, or what it held."""
        b, layer, grid = self.b, self.layer, self.grid
        slots = 2 * layer.chunk
        slot = b.arange(slots)
        last = b("Sub", grid.end, 1)
        position = b("Sub", last, b("Mod", b("Sub", last, slot), slots))  # [B, 2C]
        old = b("Less", position, grid.past)
        source = b("Where", old, slot, b("Add", b("Sub", position, grid.past), slots))
        for name, both in (("window_key", both_k), ("window_value", both_v)):
            b("Identity", self.gather(both, source, layer.kv_heads, length, layer.dim), out=outputs[f"present_{name}"])
        source = b("Where", old, slot, self.score_source(position, old))
        b(
            "Identity",
            self.gather(all_scores, source, layer.heads, score_length),
            out=outputs["present_window_score"],
        )

    def present_cache(self, keys: str, values: str, promoted: str, outputs: dict[str, str]) -> None:
        """Write the rows of promoted chunks to their slots; nothing else of the cache is touched."""
        b, layer, grid = self.b, self.layer, self.grid
        if not layer.salient:
            for name in ("salient_key", "salient_value", "salient_score"):
                if f"present_{name}" in outputs:
                    b("Identity", f"past_{name}", out=outputs[f"present_{name}"])
            return
        # Rows come from the concatenation with the cache: whoever writes in place does so after the cache was read.
        count = b("Mul", grid.chunks, layer.salient)
        if self.folds:
            taken = b("Less", self.competition.slots, b.dim("past_salient_key", 2))
            where = b("Transpose", b("NonZero", taken), perm=[1, 0])  # [M, 3]: row, head, new row
            slot = b.unsqueeze(b("GatherND", self.competition.slots, where), 1)
            index = b("Concat", b("Slice", where, [0], [2], [1]), slot, axis=1)
        else:
            rank = b("Mod", b.arange(count), layer.salient)
            first = b("Mul", b("Sub", grid.number, 2), layer.salient)  # [B, chunks]
            column = b("Div", b.arange(count), layer.salient)
            slots = b("Add", b("Gather", first, column, axis=1), rank)  # [B, k * chunks]
            where = b("Transpose", b("NonZero", b("Gather", promoted, column, axis=1)), perm=[1, 0])  # [M, 2]
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
        if "present_salient_score" in outputs:
            picked = b("GatherND", b.reshape(self.new_scores, 0, 0, -1), where)
            b("ScatterND", "past_salient_score", index, picked, out=outputs["present_salient_score"])
