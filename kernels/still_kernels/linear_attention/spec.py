"""still::LinearAttention: attention through a matrix of fixed size per head, with the update rules of ai.onnx's LinearAttention."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, StateSpec, TensorSpec

GATED, DELTA = ("gated", "gated_delta"), ("delta", "gated_delta")
"""The rules with `decay`, and those with `beta`."""

LINEAR_ATTENTION = OpSpec(
    # Symbols: H heads of values and of the state, in HQ groups for queries and HK for keys (both divide H); G query heads share a
    # state; V size of values. E is 1 (a decay per head) or D (per key channel), W is H or 1 (one beta for all heads).
    name="LinearAttention",
    torch_name="linear_attention",
    inputs=(
        TensorSpec("query", ("B", "T", "HQ", "G", "D"), "T", "activation"),
        TensorSpec("key", ("B", "T", "HK", "D"), "T", "activation"),
        TensorSpec("value", ("B", "T", "H", "V"), "T", "activation"),
        TensorSpec("decay", ("B", "T", "H", "E"), "float32", "activation", optional=True),
        TensorSpec("beta", ("B", "T", "W"), "float32", "activation", optional=True),
        TensorSpec("new_tokens", ("B",), "int64", "count"),
    ),
    # In place: one product per chunk reads the state, and the product that writes it reads the first one's result.
    states=(StateSpec("recurrent_state", ("B", "H", "D", "V"), "float32"),),
    outputs=(TensorSpec("output", ("B", "T", "H", "G", "V"), "T", "activation"),),
    attributes=(
        AttributeSpec("update_rule", "gated_delta", ("linear", "gated", "delta", "gated_delta")),
        AttributeSpec("scale", 0.0),  # factor of the output; 0 = 1 / sqrt(D)
    ),
)
