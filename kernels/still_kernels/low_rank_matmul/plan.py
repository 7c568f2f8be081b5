"""The launches of still::LowRankMatMul: still_kernels.plan says what the parts mean. Integers and texts only: no torch, no Triton."""

from __future__ import annotations

from still_graphs.ops.low_rank_matmul import LOW_RANK_MATMUL
from still_kernels.dense_matmul.plan import FEW, GROUP_ROWS
from still_kernels.plan import Branch, Launch, Plan, Region

PLAN = Plan(
    LOW_RANK_MATMUL,
    key={
        "dtype": "dtype",
        "base": "has(base)",
        "aligned": "I % 8 == 0 and R % 8 == 0 and O % 8 == 0",  # loads and stores of 16 bytes
        "count_dtype": "'int32'",  # there are no counts
    },
    constants=("few_outputs", "low_rows", "low_block", "row_block", "output_block"),
    workspace=(Region("low", "T", ("tokens", "R"), f"not ({FEW})"),),
    arguments={"M": "tokens", "N": "O", "K": "I", "R": "R"},
    steps=(
        Branch(
            FEW,
            # Each program has the whole first product, which costs less than a launch of its own.
            (Launch("low_rank", (f"ceil_div(tokens, {GROUP_ROWS})", "ceil_div(O, few_outputs)", "1")),),
            (
                Launch("lower", ("ceil_div(tokens, low_rows) * ceil_div(R, low_block)", "1", "1")),
                Launch("raise", ("ceil_div(tokens, row_block) * ceil_div(O, output_block)", "1", "1")),
            ),
        ),
    ),
)
