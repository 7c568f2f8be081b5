"""still::LowRankMatMul: a product with two thin matrices and a sum, for runtimes that launch each separately."""

from __future__ import annotations

from still_graphs.spec import OpSpec, TensorSpec

LOW_RANK_MATMUL = OpSpec(
    # Symbols: I inputs, R inner numbers, O outputs. output = base + (input inner) outer; the first product is rounded.
    name="LowRankMatMul",
    torch_name="low_rank_matmul",
    inputs=(
        TensorSpec("input", ("B", "T", "I"), "T", "activation"),
        TensorSpec("inner", ("I", "R"), "T", "weight"),
        TensorSpec("outer", ("R", "O"), "T", "weight"),
        TensorSpec("base", ("B", "T", "O"), "T", "activation", optional=True),
    ),
    outputs=(TensorSpec("output", ("B", "T", "O"), "T", "activation"),),
    traced=False,
)
