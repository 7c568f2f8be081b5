"""What the plans of ops around a GEMM share, as texts of `still_kernels.plan`: a few rows, many rows, and programs that share inputs."""

from __future__ import annotations

from still_kernels.plan import Branch, Launch, Region

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
