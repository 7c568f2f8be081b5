"""still::AddRmsNorm: a sum and its norm."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from still_kernels.add_rms_norm.spec import ADD_RMS_NORM
from still_kernels.common.stateless import StatelessInputs, StatelessVariant, defined, keyed, stateless_op
from still_kernels.op_kernels import HALVES
from still_kernels.plan import Launch, Plan
from still_kernels.tile import KernelTile, TileTable

if TYPE_CHECKING:
    from torch import Tensor, dtype


COLUMNS = 1024
"""Numbers of a token up to which a narrow block holds them."""

PLAN = Plan(
    ADD_RMS_NORM,
    key=keyed(wide=f"I > {COLUMNS}", summed="has(residual)", aligned="I % 8 == 0"),  # loads and stores of 16 bytes
    arguments={"K": "I", "epsilon": "norm_epsilon"},
    steps=(Launch("add_norm", ("tokens", "1", "1")),),
)


@dataclass(frozen=True)
class Inputs(StatelessInputs, plan=PLAN):
    """Tensors and attributes of one call, of one type, as of the op's spec."""

    input: Tensor
    residual: Tensor | None
    norm_weight: Tensor
    norm_epsilon: float = 1e-5


@defined
def naive_add_rms_norm(inputs: Inputs, wide: dtype) -> tuple[Tensor, Tensor]:
    """The sum, and the norm of the rounded sum, [B, T, I] each."""
    from still_kernels.common.naive import naive_norm

    total = inputs.input if inputs.residual is None else inputs.input + inputs.residual
    return total, naive_norm(total, inputs.norm_weight, inputs.norm_epsilon, wide)


@dataclass(frozen=True)
class Variant(StatelessVariant):
    """What the kernel is compiled for.

    wide: Whether a token has more numbers than COLUMNS.
    summed: Whether there is a residual.
    aligned: Whether it has a multiple of 8, which may be read and stored at once.
    """

    wide: int = 0
    summed: int = 1
    aligned: int = 1


TILES = [TileTable({"add_norm": tile}) for tile in (KernelTile({"BC": COLUMNS}, 4), KernelTile({"BC": 4 * COLUMNS}, 8))]
"""Narrow and wide: a token of a step in one block, SmolLM2's 576 numbers, Llama-3.1-8B's 4,096, which are 16 a thread."""


OP = stateless_op(
    PLAN,
    Variant,
    [Variant(dtype, wide, summed) for dtype, wide, summed in product(HALVES, (0, 1), (1, 0))],
    lambda variant, arch: TILES[variant.wide],
    naive_add_rms_norm,
    module="still_kernels.add_rms_norm.kernels",
    covers="sums with their norms have",
    optional={"residual": "summed"},
)
