"""The general branch: any number of new tokens, any split, ragged rows; vectorised over chunks.

Same plan as the PyTorch form: each row's tokens are on a grid of `chunks` chunks that starts at its current chunk
c0 = past_length // C; keys come from chunks c0-2 on; aligned chunk j (absolute c0-2+j) is promoted for grid chunk j.
Query heads are grouped by key/value head, [B, HK, G, ...]: MatMul broadcasts keys over G without a copy.
"""

from __future__ import annotations

from still_graphs.functions.builder import Scope
from still_kernels.hybrid_attention.body.features import features
from still_kernels.hybrid_attention.body.grid import Grid
from still_kernels.hybrid_attention.body.layer import Layer
from still_kernels.hybrid_attention.body.linear import LinearState
from still_kernels.hybrid_attention.body.salient import Salient
from still_kernels.hybrid_attention.body.window import Window

Split = tuple[str | int, ...]
"""Shape that splits the grid's cells: [B, HK, G, chunks, R, -1]."""


class General:
    """Writes the branch."""

    def __init__(self, scope: Scope, layer: Layer) -> None:
        self.b, self.layer = scope, layer
        self.grid = Grid(scope, layer)
        self.linear = LinearState(scope, layer, self.grid)
        self.split: Split = (0, layer.kv_heads, layer.group, self.grid.chunks, self.grid.rows, -1)

    def write(self, outputs: dict[str, str]) -> None:
        """Write all nodes; `outputs` maps each output of the op to its name."""
        b, layer, grid = self.b, self.layer, self.grid
        query = grid.on_grid("query")  # [B, H, cells, D]
        scaled = b("Mul", query, layer.weights["scale"])
        window = Window(b, layer, grid)
        in_window, candidates = window.sources()
        tile = (0, 0, 1, grid.chunks, 2 * layer.chunk, -1)
        k_window = b.reshape(window.pick(window.keys, in_window), *tile)  # [B, HK, 1, chunks, 2C, D]
        v_window = b.reshape(window.pick(window.values, in_window), *tile)
        k_old = window.pick(window.keys, candidates)  # [B, HK, chunks * C, D]
        v_old = window.pick(window.values, candidates)

        q_split = b.reshape(scaled, *self.split)
        logits = b("MatMul", q_split, b("Transpose", k_window, perm=[0, 1, 2, 3, 5, 4]))  # [B, HK, G, chunks, R, 2C]
        window.number_columns()
        window.join_scores(window.scores(logits))
        salient = Salient(b, layer, grid, window.old_scores())
        phi_q = b.reshape(features(b, layer, query, layer.weights["q"], (0, layer.heads, -1)), *self.split)
        keys = values = ""
        folded = None
        if layer.salient:
            keys = salient.with_cache("past_salient_key", salient.rows(k_old))
            values = salient.with_cache("past_salient_value", salient.rows(v_old))
            if salient.folds:
                folded = self.linear.folded(salient.folded(), keys, values)
        kv_state, z_state = self.linear.promote(k_old, v_old, salient, folded, outputs)
        linear = b("MatMul", phi_q, kv_state)
        mass = b("MatMul", phi_q, b.unsqueeze(z_state, 5))

        local, folded_mask = window.local_mask(salient)
        if folded_mask:
            similarity = b("Where", folded_mask, self.linear.similarity(phi_q, k_window), 0.0)
            linear = b("Add", linear, b("MatMul", similarity, v_window))
            mass = b("Add", mass, b("ReduceSum", similarity, [-1]))
        soft = self._soft(logits, layer.mask(b, local), v_window)
        numerator, denominator = self._with_cache(soft, scaled, keys, values, salient)
        self._mix(numerator, denominator, linear, mass, outputs["output"])
        window.write_present(outputs)
        salient.write_present(keys, values, outputs)

    def _soft(self, logits: str, mask: str, value: str) -> tuple[str, str, str]:
        """Softmax parts: maximum, largest probability (1 / sum of e^(s - max)), normalised mix of values."""
        b = self.b
        logits = b("Add", logits, mask)
        p = b("Softmax", logits, axis=-1)
        return b("ReduceMax", logits, [-1]), b("ReduceMax", p, [-1]), b("MatMul", p, value)

    def _with_cache(
        self, soft: tuple[str, str, str], scaled: str, keys: str, values: str, salient: Salient
    ) -> tuple[str, str]:
        """Numerator and denominator of the softmax over the window and the salient tokens, if there are any."""
        b, layer, grid = self.b, self.layer, self.grid
        own_max, weight, value = soft
        if not layer.salient:
            denominator = b("Reciprocal", weight)
            return b("Mul", denominator, value), denominator
        mask = salient.mask()
        q_rows = b.reshape(scaled, 0, layer.select_heads, -1, layer.dim)  # heads of one selection as rows
        logits = b("MatMul", q_rows, b("Transpose", keys, perm=[0, 1, 3, 2]))
        shape = (0, layer.select_heads, -1, grid.chunks, grid.rows, b.dim(logits, 3))
        logits = b("Add", b.reshape(logits, *shape), mask)
        p = b("Softmax", logits, axis=-1)
        top = b.reshape(b("ReduceMax", logits, [-1]), *self.split)
        share = b.reshape(b("ReduceMax", p, [-1]), *self.split)
        by_cache = b("MatMul", b.reshape(p, 0, 0, -1, b.dim(p, 5)), values)
        by_cache = b.reshape(by_cache, *self.split)
        row_max = b("Max", own_max, top)
        weight = b("Div", b("Exp", b("Sub", own_max, row_max)), weight)
        cache_weight = b("Div", b("Exp", b("Sub", top, row_max)), share)
        numerator = b("Add", b("Mul", weight, value), b("Mul", cache_weight, by_cache))
        return numerator, b("Add", weight, cache_weight)

    def _mix(self, numerator: str, denominator: str, linear: str, mass: str, output: str) -> None:
        """One quotient of both parts, as tokens."""
        b, layer, grid = self.b, self.layer, self.grid
        if layer.factored:
            factor = b.reshape("window_factor", 1, layer.kv_heads, layer.group, 1, 1, 1)
            numerator, denominator = b("Mul", factor, numerator), b("Mul", factor, denominator)
        if layer.gated:
            linear = b("Mul", b.reshape(grid.on_grid("gate"), *self.split), linear)
        total = b("Add", b("Add", denominator, mass), layer.mix_epsilon)
        mixed = b("Div", b("Add", numerator, linear), total)
        result = grid.to_tokens(b.reshape(mixed, 0, layer.heads, -1, layer.dim))
        b("Cast", result, to=layer.dtype, out=output)
