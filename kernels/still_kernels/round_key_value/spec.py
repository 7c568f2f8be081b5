"""still::RoundKeyValue: keys and values rounded to 8-bit caches, for runtimes that launch each step separately."""

from __future__ import annotations

from still_graphs.spec import OpSpec, TensorSpec

ROUND_KEY_VALUE = OpSpec(
    # The value of each head of a token after writing and reading it in 8 bits (`still_graphs.spec.CACHE`).
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
