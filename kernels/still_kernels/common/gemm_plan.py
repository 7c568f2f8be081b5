"""What the plans of ops around a GEMM share, as texts of `still_kernels.plan`: a few rows, many rows, and programs that share inputs."""

from __future__ import annotations

from dataclasses import dataclass

from still_kernels.plan import Branch, Launch, Matrix, Region, Step

GROUP_ROWS = 16
"""Rows that share what is read of the weight: those of a matrix instruction."""
FEW_ROWS = 4 * GROUP_ROWS
FEW = f"tokens <= {FEW_ROWS}"
"""So few rows that time is that of reading the weight."""
SPANS = (1024, 3072, 8192)
"""Outputs up to which a GEMM is of span 0, 1 and 2; beyond them of span 3. Large blocks leave a GPU idle where outputs are few."""
INNER = 64
"""Inputs that blocks of many rows have at a time, at most; where all have so many nothing is masked."""


NORM = Launch("norm", ("tokens", "1", "1"))
"""Of tokens, in front of a GEMM of many rows."""
HOST = ("split_outputs", "split_inputs", "split_programs", "tma")
"""Constants of a plan that the host alone uses; tma is 1 where kernels of blocks copy by TMA."""


def splits(outputs: str, inputs: str) -> str:
    """Programs that share the inputs of a block of outputs of a few rows: enough to fill the chip, of at least `split_inputs` each. Rows
    do not count, so that a row of several is summed as it is alone."""
    return f"max(1, min(ceil_div(split_programs, ceil_div({outputs}, split_outputs)), {inputs} // split_inputs))"


def split_regions(outputs: str) -> tuple[Region, Region]:
    """Workspace of parts of sums, and persistent arrivals of programs. All numbers of a few rows need the same: a builder measures one
    token and the most (`Plan.measured_tokens`)."""
    when = f"splits > 1 and {FEW}"
    return (
        Region("partial", "float32", ("splits", FEW_ROWS, outputs), when),
        Region("arrivals", "int32", (FEW_ROWS // GROUP_ROWS, f"ceil_div({outputs}, split_outputs)"), when),
    )


def few_launch(kernel: str, outputs: str, block: str) -> Launch:
    """The launch of a kernel whose programs have `block` of all outputs of a few rows."""
    return Launch(kernel, (f"ceil_div(tokens, {GROUP_ROWS})", f"ceil_div({outputs}, {block})", "1"))


def block_launch(kernel: str, rows: str, block: str, outputs: str) -> Launch:
    """The launch of a kernel with a program for each block of rows and outputs."""
    return Launch(kernel, (f"ceil_div(tokens, {rows}) * ceil_div({outputs}, {block})", "1", "1"))


@dataclass(frozen=True)
class Gemm:
    """A GEMM by the kernels `few`, `split`, `some` and `many` of a suffix, of which some and many are others where they copy by TMA.

    Args:
        inputs, outputs: How many, expressions.
        left, right: The matrices that are copied, the right one of so many `columns`, by default the outputs.
        few: The plan's constant for outputs of a program of few.
        some, many: Its constants for rows and outputs of their programs.
        programs: Its constant for the programs that share the blocks of many where it copies by TMA; "": each has one.
        fewest: Blocks of many that are worth their size.
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
        """The plan's constants, and where kernels have them."""
        places = {self.few: "few.BN"}
        for kernel, (rows, outputs) in {"some": self.some, "many": self.many}.items():
            places |= {rows: f"{kernel}.BM", outputs: f"{kernel}.BN"}
        return {name: place.replace(".", f"{self.suffix}.") for name, place in places.items()}

    @property
    def matrices(self) -> tuple[Matrix, Matrix]:
        """Those that are copied."""
        return Matrix(self.left, "tokens", self.inputs), Matrix(self.right, self.inputs, self.columns or self.outputs)

    def few_step(self) -> Launch:
        """Of a few rows."""
        return few_launch(f"few{self.suffix}", self.outputs, self.few)

    def split_step(self, *before: Step) -> Branch:
        """Of a few rows, whose programs share inputs where `splits` says so; what comes before that."""
        grid = f"ceil_div(tokens, {GROUP_ROWS})", f"ceil_div({self.outputs}, split_outputs)", "splits"
        return Branch("splits > 1", (*before, Launch(f"split{self.suffix}", grid)), (self.few_step(),))

    def many_step(self) -> Branch:
        """Of many rows, or of some: so few that blocks made for thousands leave much of the chip idle."""
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
