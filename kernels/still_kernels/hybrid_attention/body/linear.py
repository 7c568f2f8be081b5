"""The linear state S, z: tokens that leave the window without being salient, or that leave the salient cache."""

from __future__ import annotations

from still_graphs.functions.builder import FLOAT, Scope
from still_kernels.hybrid_attention.body.features import features
from still_kernels.hybrid_attention.body.grid import Grid
from still_kernels.hybrid_attention.body.layer import Layer
from still_kernels.hybrid_attention.body.salient import Salient


class LinearState:
    """S and z of a call.

    weight_k: Feature map of keys, [HK or 1, G or 1, D, P].
    """

    def __init__(self, scope: Scope, layer: Layer, grid: Grid) -> None:
        self.b, self.layer, self.grid = scope, layer, grid
        heads = (layer.kv_heads, layer.group) if layer.weight_heads > 1 else (1, 1)
        self.weight_k = scope.reshape(layer.weights["k"], *heads, layer.dim, -1)

    def folded(self, folded: str, keys: str, values: str) -> tuple[str, str]:
        """Contribution of the rows `folded` [B, chunks, M] of keys and values to S [B, HK, G, chunks, F, D] and z [B, HK, G, chunks,
        F, 1]."""
        b, layer, grid = self.b, self.layer, self.grid
        leaves = b.cast(folded, FLOAT)
        # Each entry leaves once, at most k per chunk.
        most = b("Mul", grid.chunks, layer.salient)
        _, index = b.multi("TopK", b("ReduceMax", leaves, [1], keepdims=0), most, out=2)  # [B, Q]
        group = layer.group if layer.per_query_head else 1

        def pick(x: str) -> str:
            every = b("Expand", b.unsqueeze(index, 1, 3), b.shape(layer.batch, layer.select_heads, most, 1))
            rows = b("GatherND", x, every, batch_dims=2)
            return b.reshape(rows, 0, layer.kv_heads, group, -1, layer.dim)

        phi = features(b, layer, pick(keys), self.weight_k, (0, layer.kv_heads, layer.group, -1))
        phi = b.unsqueeze(b("Transpose", phi, perm=[0, 1, 2, 4, 3]), 3)  # [B, HK, G, 1, F, Q]
        places = b("Expand", b.unsqueeze(index, 1), b.shape(layer.batch, grid.chunks, most))
        when = b("GatherElements", leaves, places, axis=2)
        when = b.unsqueeze(when, 1, 2, 4)  # [B, 1, 1, chunks, 1, Q]
        phi = b("Mul", phi, when)
        return b("MatMul", phi, b.unsqueeze(pick(values), 3)), b("ReduceSum", phi, [-1])

    def promote(
        self, k: str, v: str, salient: Salient, folded: tuple[str, str] | None, outputs: dict[str, str]
    ) -> tuple[str, str]:
        """S and z for each grid chunk, [B, HK, G, chunks, F, D] and [B, HK, G, chunks, F]; the last ones become present.

        Args:
            k, v: Chunks that may be promoted, [B, HK, chunks * C, D].
            folded: Contribution of entries that leave the cache.
        """
        b, layer, grid = self.b, self.layer, self.grid
        chunk = layer.chunk
        enters = b.cast(b.reshape(salient.promoted, 0, 1, -1, 1), FLOAT)  # [B, 1, chunks, 1]
        if salient.selection:
            enters = b("Mul", salient.marked(salient.selection, 1.0, 0.0), enters)  # [B, HS, chunks, C]
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

    def similarity(self, phi_q: str, k_window: str) -> str:
        """Features of queries [B, HK, G, chunks, R, F] times those of their windows' keys, [B, HK, G, chunks, R, 2C]."""
        b, layer = self.b, self.layer
        flat = b.reshape(k_window, 0, 0, 1, -1, layer.dim)
        phi = features(b, layer, flat, self.weight_k, (0, layer.kv_heads, layer.group, -1))
        phi = b.reshape(phi, 0, 0, 0, self.grid.chunks, 2 * layer.chunk, -1)
        return b("MatMul", phi_q, b("Transpose", phi, perm=[0, 1, 2, 3, 5, 4]))
