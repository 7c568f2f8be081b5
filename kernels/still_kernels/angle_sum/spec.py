"""still::AngleSum: angles that accumulate over tokens, for states with data-dependent rotation."""

from __future__ import annotations

from still_graphs.spec import OpSpec, StateSpec, TensorSpec

ANGLE_SUM = OpSpec(
    # A is the number of angles. output = sum over the tokens so far of pi tanh(angle) step, modulo 2 pi. The sum is in integers of
    # 1 / 2^32 turns, so it does not depend on how a sequence is split and stays exact after a million tokens.
    name="AngleSum",
    torch_name="angle_sum",
    inputs=(
        TensorSpec("angle", ("B", "T", "A"), "T", "activation"),
        TensorSpec("step", ("B", "T", "H"), "float32", "activation"),
        TensorSpec("new_tokens", ("B",), "int64", "count"),
    ),
    # Cosine minus 1 and sine of the sum are continuous where turns wrap. In place: it is read before it is written.
    states=(StateSpec("angle_state", ("B", "H", "A", 2), "float32"),),
    outputs=(TensorSpec("output", ("B", "T", "H", "A"), "float32", "activation"),),
)

TURN = 1 << 32
"""One turn in integers."""
