"""still::AngleSum: angles that add up over tokens, for states that turn by what tokens say."""

from __future__ import annotations

from still_graphs.spec import OpSpec, StateSpec, TensorSpec

ANGLE_SUM = OpSpec(
    # A is the number of angles. output = sum over the tokens so far of pi tanh(angle) step, less whole turns. The sum is of turns over
    # 2^32 as whole numbers: the same however a sequence is split, and as exact after a million tokens as after one.
    name="AngleSum",
    torch_name="angle_sum",
    inputs=(
        TensorSpec("angle", ("B", "T", "A"), "T", "activation"),
        TensorSpec("step", ("B", "T", "H"), "float32", "activation"),
        TensorSpec("new_tokens", ("B",), "int64", "count"),
    ),
    # Cosine less 1 and sine of the sum: it has no jump where turns wrap. In place: it is read before it is written.
    states=(StateSpec("angle_state", ("B", "H", "A", 2), "float32"),),
    outputs=(TensorSpec("output", ("B", "T", "H", "A"), "float32", "activation"),),
)

TURN = 1 << 32
"""A turn in whole numbers."""
