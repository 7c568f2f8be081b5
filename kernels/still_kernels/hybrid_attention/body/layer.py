"""Shared parts of the body: attributes of the node, dimensions, positions."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import helper

from still_graphs.functions.builder import FLOAT, Scope
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION

MASKED = -1e30
"""Added to masked logits: far below any logit, and finite, so that a row with only masked ones has no NaN."""


class Layer:
    """One node: its attributes as Python values, its dimensions and frequent index tensors as values of the outermost scope.

    Index tensors that depend only on past_length and new_tokens are outside the branches. They are equal in all layers, so a runtime that
    eliminates common subexpressions computes them once per step.
    """

    def __init__(self, node: onnx.NodeProto, dtype: int, dims: Mapping[str, int], scope: Scope) -> None:
        """Read `node`; absent attributes have their defaults. `dims` are the OpSpec's symbols with fixed values."""
        values = {a.name: a.default for a in HYBRID_ATTENTION.attributes}
        for attribute in node.attribute:
            value = helper.get_attribute_value(attribute)
            values[attribute.name] = value.decode().rstrip("\0") if isinstance(value, bytes) else value
        present = dict(zip(HYBRID_ATTENTION.input_names(), node.input, strict=False))
        self.scope, self.dtype = scope, dtype
        self.chunk, self.salient = int(values["chunk_size"]), int(values["salient_per_chunk"])
        self.scope_kind, self.saliency = str(values["select_scope"]), str(values["saliency"])
        self.feature_map, self.local = str(values["feature_map"]), str(values["local"])
        self.window = int(values["window_size"]) or self.chunk
        self.mix_epsilon = float(values["mix_epsilon"])
        self.phantom, self.overflow = bool(values["phantom_first_chunk"]), str(values["overflow"])
        self.gated, self.factored = bool(present.get("gate")), bool(present.get("window_factor"))
        self.heads, self.kv_heads, self.dim = dims["H"], dims["HK"], dims["D"]
        self.features, self.weight_heads = dims["F"], dims["WH"]
        self.batch = scope.dim("past_length", 0)
        # A vector, not a scalar: as a factor fused into MatMul a scalar would lose the fast path for one row.
        self.weights = {"scale": scope.constant([self.dim**-0.5] * self.dim, "float32")}
        for name in ("q", "k"):
            # [H or 1, D, P]: constants, folded when the model is loaded.
            self.weights[name] = scope("Transpose", self.wide(scope, f"feature_{name}_weight"), perm=[0, 2, 1])

    @property
    def per_query_head(self) -> bool:
        """Whether each query head has its own selection."""
        return self.scope_kind == "q_head"

    @property
    def group(self) -> int:
        """G, query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def select_heads(self) -> int:
        """HS, heads of the selection and of the salient cache."""
        return self.heads if self.per_query_head else self.kv_heads

    def wide(self, b: Scope, x: str) -> str:
        """`x` in float32."""
        return x if self.dtype == FLOAT else b.cast(x, FLOAT)

    def narrow(self, b: Scope, x: str) -> str:
        """`x` in the activations' type."""
        return x if self.dtype == FLOAT else b.cast(x, self.dtype)

    def mask(self, b: Scope, visible: str) -> str:
        """0 where `visible`, else a large negative number, float32."""
        return b("Where", visible, 0.0, MASKED)

    def cached_rows(self, b: Scope) -> str:
        """Number of salient rows cached before the call, int64 [B]: k for every promoted chunk (the cache may have fewer)."""
        chunks = b("Sub", b("Div", b("Add", "past_length", self.chunk - 1), self.chunk), 2)
        return b("Mul", b("Max", chunks, 0), self.salient)
