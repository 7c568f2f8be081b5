"""still::RankOneAttention: linear attention whose state each token multiplies with a diagonal matrix and one of rank one."""

from __future__ import annotations

from still_graphs.spec import OpSpec, StateSpec, TensorSpec

_KEYS = ("B", "T", "H", "D")
RANK_ONE_ATTENTION = OpSpec(
    # V is the size of values.
    name="RankOneAttention",
    torch_name="rank_one_attention",
    inputs=(
        TensorSpec("query", _KEYS, "T", "activation"),
        TensorSpec("key", _KEYS, "T", "activation"),
        TensorSpec("value", ("B", "T", "H", "V"), "T", "activation"),
        TensorSpec("decay", _KEYS, "float32", "activation"),
        TensorSpec("read_key", _KEYS, "T", "activation"),
        TensorSpec("write_key", _KEYS, "T", "activation"),
        TensorSpec("new_tokens", ("B",), "int64", "count"),
    ),
    # In place as LinearAttention's: one product a chunk reads the state, and what is written comes after it.
    states=(StateSpec("recurrent_state", ("B", "H", "D", "V"), "float32"),),
    outputs=(TensorSpec("output", ("B", "T", "H", "V"), "T", "activation"),),
)
