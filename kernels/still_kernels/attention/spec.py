"""still::Attention: causal softmax attention with a cache, for the softmax layers of a mixed model."""

from __future__ import annotations

from still_graphs.spec import CACHE, Growth, OpSpec, StateSpec, TensorSpec, scales_of

CAPACITY = Growth("capacity", 2)
"""Position p of a sequence is row p of its cache."""

KEY_AND_VALUE = tuple(StateSpec(name, ("B", "HK", "N", "D"), "T", CAPACITY, narrow=True) for name in ("key", "value"))

HEADS = (
    TensorSpec("query", ("B", "T", "H", "D"), "T", "activation"),
    TensorSpec("key", ("B", "T", "HK", "D"), "T", "activation"),
    TensorSpec("value", ("B", "T", "HK", "D"), "T", "activation"),
)
COUNTS = (TensorSpec("new_tokens", ("B",), "int64", "count"), TensorSpec("past_length", ("B",), "int64", "count"))
"""Number of new tokens of each sequence, the rest of T is padding; and number of earlier tokens."""
OUTPUT = TensorSpec("output", ("B", "T", "H", "D"), "T", "activation")
"""Output of attention with a cache, with any mask."""

ATTENTION = OpSpec(
    name="Attention",
    torch_name="attention",
    inputs=(*HEADS, *COUNTS),
    states=(*KEY_AND_VALUE, *map(scales_of, KEY_AND_VALUE)),
    outputs=(OUTPUT,),
    attributes=(CACHE,),
)
