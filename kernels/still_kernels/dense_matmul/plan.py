"""The launches of still::DenseMatMul: still_kernels.plan says what the parts mean. Integers and texts only: no torch, no Triton."""

from __future__ import annotations

from still_graphs.ops.dense_matmul import DENSE_MATMUL
from still_kernels.plan import Alias, Branch, Check, Launch, Matrix, Plan, Region

GROUP_ROWS = 16
"""Rows that share what is read of the weight: those of a matrix instruction."""
FEW_ROWS = 4 * GROUP_ROWS
FEW = f"tokens <= {FEW_ROWS}"
"""So few rows that time is that of reading the weight."""
SPANS = (1024, 3072, 8192)
"""Outputs up to which a product is of span 0, 1 and 2; beyond them of span 3. Large blocks leave a GPU idle where outputs are few."""


INNER = 64
"""Inputs that blocks of many rows have at a time, at most; where all have so many nothing is masked."""


def splits(outputs: str, inputs: str) -> str:
    """Programs that share the inputs of a block of outputs of a few rows: enough to fill the chip, of at least `split_inputs` each. Rows
    do not count, so that a row of several is summed as it is alone."""
    return f"max(1, min(ceil_div(split_programs, ceil_div({outputs}, split_outputs)), {inputs} // split_inputs))"


def split_grid(outputs: str) -> tuple[str, str, str]:
    """Programs of the kernels whose programs share inputs."""
    return f"ceil_div(tokens, {GROUP_ROWS})", f"ceil_div({outputs}, split_outputs)", "splits"


def split_regions(outputs: str) -> tuple[Region, Region]:
    """Workspace of parts of sums, and persistent arrivals of programs. All numbers of a few rows need the same: a builder measures one
    token and the most (`Plan.measured_tokens`)."""
    when = f"splits > 1 and {FEW}"
    return (
        Region("partial", "float32", ("splits", FEW_ROWS, outputs), when),
        Region("arrivals", "int32", (FEW_ROWS // GROUP_ROWS, f"ceil_div({outputs}, split_outputs)"), when),
    )


def blocks(rows: str, outputs: str, of: str) -> str:
    """Blocks of so many rows and outputs that a product with `of` outputs has."""
    return f"ceil_div(tokens, {rows}) * ceil_div({of}, {outputs})"


def by_blocks(kernel: str, rows: str, outputs: str, of: str) -> Branch:
    """The launch of a kernel with blocks of rows and outputs, or where it copies by TMA of that one."""
    grid = (blocks(rows, outputs, of), "1", "1")
    return Branch("tma", (Launch(f"{kernel}_tma", grid),), (Launch(kernel, grid),))


def is_some(rows: str, outputs: str, of: str) -> str:
    """Whether there are so few rows that blocks of so many rows and outputs, made for thousands, leave much of the chip idle."""
    return f"tokens <= 256 or {blocks(rows, outputs, of)} < split_programs"


def span(outputs: str) -> str:
    """The span of a number of outputs, as an expression."""
    first, second, third = SPANS
    return f"0 if {outputs} <= {first} else 1 if {outputs} <= {second} else 2 if {outputs} <= {third} else 3"


PARTIAL, ARRIVALS = split_regions("O")

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
    constants=(
        "few_outputs",
        "split_outputs",
        "split_inputs",
        "split_programs",
        "norm_apart",
        "some_rows",
        "some_outputs",
        "row_block",
        "output_block",
        "tma",  # 1: kernels of blocks copy by TMA
    ),
    checks=(Check("has(weight) != has(turned_weight)", "one of weight and turned_weight is wanted."),),
    define={"splits": f"1 if has(turned_weight) or has(norm_weight) and O * I < norm_apart else {splits('O', 'I')}"},
    workspace=(
        Region("rows", "T", (f"max(tokens, {FEW_ROWS})", "I"), f"has(norm_weight) and (splits > 1 or not ({FEW}))"),
        PARTIAL,
    ),
    persistent=(ARRIVALS,),
    aliases=(Alias("rows", "input", "not has(norm_weight)"),),
    matrices=(Matrix("rows", "tokens", "I"), Matrix("weight", "I", "O")),
    arguments={"M": "tokens", "N": "O", "K": "I", "epsilon": "norm_epsilon"},
    steps=(
        Branch(
            FEW,
            (
                Branch(
                    "splits > 1",
                    (
                        Branch("has(norm_weight)", (Launch("norm", ("tokens", "1", "1")),)),
                        Launch("split", split_grid("O")),
                    ),
                    (Launch("few", (f"ceil_div(tokens, {GROUP_ROWS})", "ceil_div(O, few_outputs)", "1")),),
                ),
            ),
            (
                Branch("has(norm_weight)", (Launch("norm", ("tokens", "1", "1")),)),
                Branch(
                    is_some("row_block", "output_block", "O"),
                    (by_blocks("some", "some_rows", "some_outputs", "O"),),
                    (by_blocks("many", "row_block", "output_block", "O"),),
                ),
            ),
        ),
    ),
)
