"""still::Attention: causal softmax attention with a cache, for the layers of a mixed model that stay softmax."""

from __future__ import annotations

from still_graphs.ops.spec import CACHE, Growth, OpSpec, StateSpec, TensorSpec, scales_of

CAPACITY = Growth("capacity", 2)
"""Position p of a row lies in row p of its cache."""

_KEY = StateSpec("key", ("B", "HK", "N", "D"), "T", CAPACITY, narrow=True)
_VALUE = StateSpec("value", ("B", "HK", "N", "D"), "T", CAPACITY, narrow=True)

ATTENTION = OpSpec(
    name="Attention",
    torch_name="attention",
    inputs=(
        TensorSpec("query", ("B", "T", "H", "D"), "T", "activation"),
        TensorSpec("key", ("B", "T", "HK", "D"), "T", "activation"),
        TensorSpec("value", ("B", "T", "HK", "D"), "T", "activation"),
        TensorSpec("new_tokens", ("B",), "int64", "count"),
        TensorSpec("past_length", ("B",), "int64", "count"),
    ),
    states=(_KEY, _VALUE, scales_of(_KEY), scales_of(_VALUE)),
    outputs=(TensorSpec("output", ("B", "T", "H", "D"), "T", "activation"),),
    attributes=(CACHE,),
)
