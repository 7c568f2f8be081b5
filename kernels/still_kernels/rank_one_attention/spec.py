"""still::RankOneAttention: linear attention whose state is multiplied by a diagonal plus a rank-one matrix at each token."""

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
    # In place like LinearAttention: one product per chunk reads the state, and writes come after it.
    states=(StateSpec("recurrent_state", ("B", "H", "D", "V"), "float32"),),
    outputs=(TensorSpec("output", ("B", "T", "H", "V"), "T", "activation"),),
)
