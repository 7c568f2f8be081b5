"""The launches of still::DenseMatMul: still_kernels.plan says what the parts mean. Integers and texts only: no torch, no Triton."""

from __future__ import annotations

from still_graphs.ops.dense_matmul import DENSE_MATMUL
from still_kernels.plan import Alias, Branch, Check, Launch, Plan, Region

GROUP_ROWS = 16
"""Rows that share what is read of the weight: those of a matrix instruction."""
FEW = f"tokens <= {4 * GROUP_ROWS}"
"""So few rows that time is that of reading the weight."""
SPANS = (1024, 3072, 8192)
"""Outputs up to which a product is of span 0, 1 and 2; beyond them of span 3. Large blocks leave a GPU idle where outputs are few."""


INNER = 64
"""Inputs that blocks of many rows have at a time, at most; where all have so many nothing is masked."""


def span(outputs: str) -> str:
    """The span of a number of outputs, as an expression."""
    first, second, third = SPANS
    return f"0 if {outputs} <= {first} else 1 if {outputs} <= {second} else 2 if {outputs} <= {third} else 3"


PLAN = Plan(
    DENSE_MATMUL,
    key={
        "dtype": "dtype",
        "turned": "has(turned_weight)",
        "normed": "has(norm_weight)",
        "residual": "has(residual)",
        "aligned": "O % 8 == 0 and I % 8 == 0",  # loads and stores of 16 bytes
        "whole": f"I % {INNER} == 0",
        "span": span("O"),
        "count_dtype": "'int32'",  # there are no counts
    },
    constants=("few_outputs", "row_block", "output_block"),
    checks=(Check("has(weight) != has(turned_weight)", "one of weight and turned_weight is wanted."),),
    workspace=(Region("rows", "T", ("tokens", "I"), f"has(norm_weight) and not ({FEW})"),),
    aliases=(Alias("rows", "input", f"not has(norm_weight) or {FEW}"),),
    arguments={"M": "tokens", "N": "O", "K": "I", "epsilon": "norm_epsilon"},
    steps=(
        Branch(
            FEW,
            (Launch("few", (f"ceil_div(tokens, {GROUP_ROWS})", "ceil_div(O, few_outputs)", "1")),),
            (
                Branch("has(norm_weight)", (Launch("norm", ("tokens", "1", "1")),)),
                Launch("many", ("ceil_div(tokens, row_block) * ceil_div(O, output_block)", "1", "1")),
            ),
        ),
    ),
)
