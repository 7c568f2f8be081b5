"""Parts of plans that ops around a GEMM share, as texts of `still_kernels.plan`: few rows, many rows, and programs that share inputs."""

from __future__ import annotations

from dataclasses import dataclass

from still_kernels.plan import Branch, Launch, Matrix, Region, Step

GROUP_ROWS = 16
"""Rows that share one read of the weight: those of a matrix instruction."""
FEW_ROWS = 4 * GROUP_ROWS
FEW = f"tokens <= {FEW_ROWS}"
"""So few rows that reading the weight dominates the time."""
SPANS = (1024, 3072, 8192)
"""Largest number of outputs of a GEMM of span 0, 1 and 2; larger ones are span 3. Large blocks leave a GPU idle if outputs are few."""
INNER = 64
"""Most inputs per step of blocks of many rows; if all blocks have this many, nothing is masked."""


NORM = Launch("norm", ("tokens", "1", "1"))
"""Normalizes tokens before a GEMM of many rows."""
HOST = ("split_outputs", "split_inputs", "split_programs", "tma")
"""Constants of a plan for the host only; tma is 1 if kernels of blocks copy by TMA."""


def splits(outputs: str, inputs: str) -> str:
    """Number of programs that share the inputs of a block of outputs of few rows: enough to fill the chip, each with at least
    `split_inputs`. It does not depend on the rows, so a row in a batch is summed as it is alone."""
    return f"max(1, min(ceil_div(split_programs, ceil_div({outputs}, split_outputs)), {inputs} // split_inputs))"


def split_regions(outputs: str) -> tuple[Region, Region]:
    """Workspace for partial sums, and persistent arrival counters of programs. All small row counts need the same: a builder measures one
    token and the largest count (`Plan.measured_tokens`)."""
    when = f"splits > 1 and {FEW}"
    return (
        Region("partial", "float32", ("splits", FEW_ROWS, outputs), when),
        Region("arrivals", "int32", (FEW_ROWS // GROUP_ROWS, f"ceil_div({outputs}, split_outputs)"), when),
    )


def few_launch(kernel: str, outputs: str, block: str) -> Launch:
    """The launch of a kernel whose programs compute `block` of the outputs for few rows."""
    return Launch(kernel, (f"ceil_div(tokens, {GROUP_ROWS})", f"ceil_div({outputs}, {block})", "1"))


def block_launch(kernel: str, rows: str, block: str, outputs: str) -> Launch:
    """The launch of a kernel with one program for each block of rows and outputs."""
    return Launch(kernel, (f"ceil_div(tokens, {rows}) * ceil_div({outputs}, {block})", "1", "1"))


@dataclass(frozen=True)
class Gemm:
    """A GEMM with the kernels `few`, `split`, `some` and `many` of a suffix. `some` and `many` have variants that copy by TMA.

    Args:
        inputs, outputs: Numbers of them, as expressions.
        left, right: The matrices that are copied; the right one has `columns`, by default the outputs.
        few: The plan's constant for outputs of a program of `few`.
        some, many: The plan's constants for rows and outputs of their programs.
        programs: The plan's constant for the number of programs that share the blocks of `many` by TMA; "": one program for each block.
        fewest: Smallest number of blocks for which `many` pays off.
    """

    inputs: str
    outputs: str
    left: str
    right: str
    columns: str = ""
    suffix: str = ""
    few: str = "few_outputs"
    some: tuple[str, str] = ("some_rows", "some_outputs")
    many: tuple[str, str] = ("row_block", "output_block")
    programs: str = ""
    fewest: str = "split_programs"

    @property
    def constants(self) -> dict[str, str]:
        """The plan's constants, and their names in kernels."""
        places = {self.few: "few.BN"}
        for kernel, (rows, outputs) in {"some": self.some, "many": self.many}.items():
            places |= {rows: f"{kernel}.BM", outputs: f"{kernel}.BN"}
        return {name: place.replace(".", f"{self.suffix}.") for name, place in places.items()}

    @property
    def matrices(self) -> tuple[Matrix, Matrix]:
        """The matrices that are copied."""
        return Matrix(self.left, "tokens", self.inputs), Matrix(self.right, self.inputs, self.columns or self.outputs)

    def few_step(self) -> Launch:
        """The step for few rows."""
        return few_launch(f"few{self.suffix}", self.outputs, self.few)

    def split_step(self, *before: Step) -> Branch:
        """The step for few rows, with `before` in front, whose programs share inputs where `splits` is more than one."""
        grid = f"ceil_div(tokens, {GROUP_ROWS})", f"ceil_div({self.outputs}, split_outputs)", "splits"
        return Branch("splits > 1", (*before, Launch(f"split{self.suffix}", grid)), (self.few_step(),))

    def many_step(self) -> Branch:
        """The step for many rows, or for some: so few that blocks for thousands of rows leave much of the chip idle."""
        some, many = (
            f"ceil_div(tokens, {rows}) * ceil_div({self.outputs}, {block})" for rows, block in (self.some, self.many)
        )
        shared = f"min({self.programs}, {many})" if self.programs else many

        def either(kernel: str, copying: str, blocks: str) -> Branch:
            grids = {f"{kernel}{self.suffix}_tma": copying, f"{kernel}{self.suffix}": blocks}
            return Branch("tma", *((Launch(name, (grid, "1", "1")),) for name, grid in grids.items()))

        condition = f"tokens <= 256 or {many} < {self.fewest}"
        return Branch(condition, (either("some", some, some),), (either("many", shared, many),))


def span(outputs: str) -> str:
    """The span of a number of outputs, as an expression."""
    first, second, third = SPANS
    return f"0 if {outputs} <= {first} else 1 if {outputs} <= {second} else 2 if {outputs} <= {third} else 3"
