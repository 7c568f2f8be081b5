"""still::LowRankMatMul: two GEMMs with thin matrices."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from still_kernels.common.gemm_plan import FEW, block_launch, few_launch
from still_kernels.common.stateless import StatelessInputs, StatelessVariant, defined, keyed, stateless_op
from still_kernels.low_rank_matmul.spec import LOW_RANK_MATMUL
from still_kernels.op_kernels import HALVES
from still_kernels.plan import Branch, Plan, Region
from still_kernels.tile import KernelTile, TileTable

if TYPE_CHECKING:
    from torch import Tensor, dtype


PLAN = Plan(
    LOW_RANK_MATMUL,
    key=keyed(base="has(base)", aligned="I % 8 == 0 and R % 8 == 0 and O % 8 == 0"),  # loads and stores of 16 bytes
    constants=("few_outputs", "low_rows", "low_block", "row_block", "output_block"),
    workspace=(Region("low", "T", ("tokens", "R"), f"not ({FEW})"),),
    arguments={"M": "tokens", "N": "O", "K": "I", "R": "R"},
    steps=(
        Branch(
            FEW,
            (
                few_launch("low_rank", "O", "few_outputs"),
            ),  # each program has all of the first, which costs less than a launch
            (
                block_launch("lower", "low_rows", "low_block", "R"),
                block_launch("raise", "row_block", "output_block", "O"),
            ),
        ),
    ),
)


@dataclass(frozen=True)
class Inputs(StatelessInputs, plan=PLAN):
    """Tensors and attributes of one call, of one type, as of the op's spec."""

    input: Tensor
    inner: Tensor
    outer: Tensor
    base: Tensor | None = None


@defined
def naive_low_rank_matmul(inputs: Inputs, wide: dtype) -> Tensor:
    """base + (input inner) outer [B, T, O]; what lies between the GEMMs is rounded."""
    low = (inputs.input.to(wide) @ inputs.inner.to(wide)).to(inputs.input.dtype)
    result = low.to(wide) @ inputs.outer.to(wide)
    return result if inputs.base is None else result + inputs.base.to(wide)


@dataclass(frozen=True)
class Variant(StatelessVariant):
    """base: Whether the result is added to something. aligned: Whether sizes are multiples of 8, read and stored at once."""

    base: int = 0
    aligned: int = 1


_MANY = {"BM": 64, "BN": 64, "BK": 64, "GROUP": 8, "STAGES": 3}
_RAISE = {**_MANY, "BN": 128, "BK": 32}
_LOW_RANK = KernelTile({"BN": 32, "BK": 128, "BR": 64, "STAGES": 3}, 4, 3)
TILES = TileTable({"low_rank": _LOW_RANK, "lower": KernelTile(_MANY, 4, 3), "raise": KernelTile(_RAISE, 4, 3)})
"""One for every variant and architecture: 60 KB of shared memory for a few rows, all programs of a step at once."""


OP = stateless_op(
    PLAN,
    Variant,
    [Variant(dtype, base) for dtype, base in product(HALVES, (0, 1))],
    lambda variant, arch: TILES,
    naive_low_rank_matmul,
    module="still_kernels.low_rank_matmul.kernels",
    covers="GEMMs with dense weights have",
    blocks=dict(zip(PLAN.constants, ("low_rank.BN", "lower.BM", "lower.BN", "raise.BM", "raise.BN"), strict=True)),
    optional={"base": "base"},
)
