"""still::SwiGlu: the gate of a feed-forward layer, silu of one half of its numbers times the other half."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from still_kernels.common.stateless import StatelessInputs, StatelessVariant, defined, keyed, stateless_op
from still_kernels.op_kernels import HALVES
from still_kernels.plan import Check, Launch, Plan
from still_kernels.swi_glu.spec import SWI_GLU
from still_kernels.tile import KernelTile, TileTable

if TYPE_CHECKING:
    from torch import Tensor, dtype


PLAN = Plan(
    SWI_GLU,
    key=keyed(aligned="width % 8 == 0"),  # loads and stores of 16 bytes
    constants=("column_block",),
    checks=(Check("width > 0", "width={width}: expected numbers."),),
    arguments={"N": "width"},
    steps=(Launch("swi_glu", ("tokens", "ceil_div(width, column_block)", "1")),),
)


@dataclass(frozen=True)
class Inputs(StatelessInputs, plan=PLAN):
    """Tensor and attribute of one call, as of the op's spec."""

    input: Tensor
    width: int


@defined
def naive_swi_glu(inputs: Inputs, wide: dtype) -> Tensor:
    """silu(gate) * up [B, T, width]."""
    from still_kernels.common.naive import naive_gate

    return naive_gate(inputs.input.to(wide))


@dataclass(frozen=True)
class Variant(StatelessVariant):
    """aligned: Whether a half is a multiple of 8, for 16-byte accesses."""

    aligned: int = 1


TILES = TileTable({"swi_glu": KernelTile({"BC": 1024}, 4)})
"""One for every variant and architecture, since a launch or memory bandwidth dominates. A program has 16 bytes of each half per thread:
SmolLM2's 1,536 numbers in two programs, Llama-3.1-8B's 14,336 in fourteen."""

OP = stateless_op(
    PLAN,
    Variant,
    [Variant(dtype) for dtype in HALVES],
    lambda variant, arch: TILES,
    naive_swi_glu,
    module="still_kernels.swi_glu.kernels",
    covers="gates have",
    blocks={"column_block": "swi_glu.BC"},
)
