"""still::RoundKeyValue: keys and values as caches in 8 bits hold them, for runtimes that launch each step of it."""

from __future__ import annotations

from still_graphs.spec import OpSpec, TensorSpec

ROUND_KEY_VALUE = OpSpec(
    # Of each head of a token what is left after it was written in 8 bits and read (`still_graphs.spec.CACHE`).
    name="RoundKeyValue",
    torch_name="round_key_value",
    inputs=(
        TensorSpec("key", ("B", "T", "HK", "D"), "T", "activation"),
        TensorSpec("value", ("B", "T", "HK", "D"), "T", "activation"),
    ),
    outputs=(
        TensorSpec("rounded_key", ("B", "T", "HK", "D"), "T", "activation"),
        TensorSpec("rounded_value", ("B", "T", "HK", "D"), "T", "activation"),
    ),
    traced=False,
)
