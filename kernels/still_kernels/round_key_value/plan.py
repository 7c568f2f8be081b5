"""still::RoundKeyValue: keys and values rounded to 8-bit caches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from still_kernels.common.stateless import StatelessInputs, StatelessVariant, keyed, stateless_op
from still_kernels.op_kernels import HALVES, HEAD_DIM
from still_kernels.plan import Launch, Plan
from still_kernels.round_key_value.spec import ROUND_KEY_VALUE
from still_kernels.tile import KernelTile, TileTable, pow2

if TYPE_CHECKING:
    from torch import Tensor


PLAN = Plan(
    ROUND_KEY_VALUE,
    key=keyed(head_dim="D"),
    constants=("row_block",),
    arguments={"M": "tokens * HK"},
    steps=(Launch("round", ("ceil_div(tokens * HK, row_block)", "2", "1")),),
)


@dataclass(frozen=True)
class Inputs(StatelessInputs, plan=PLAN):
    """key, value: [B, T, HK, D], of one type."""

    key: Tensor
    value: Tensor


def naive_round_key_value(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Keys and values [B, T, HK, D], dtype of the inputs, each head of a token rounded to codes with its own scale. ShapeError: A tensor
    does not fit."""
    from still_kernels.codes import rounded

    inputs.check()
    return rounded(inputs.key), rounded(inputs.value)


@dataclass(frozen=True)
class Variant(StatelessVariant):
    """Properties that the kernel is compiled for."""

    head_dim: int = 128


TILES = TileTable({"round": KernelTile({"BR": 4}, 2)})
"""Heads of tokens of one program, for every variant and architecture, since a launch or memory bandwidth dominates."""


OP = stateless_op(
    PLAN,
    Variant,
    [Variant(dtype, head_dim) for dtype, head_dim in product(HALVES, (64, 128))],
    lambda variant, arch: TILES,
    naive_round_key_value,
    module="still_kernels.round_key_value.kernels",
    covers="roundings of keys and values have",
    also=(HEAD_DIM,),
    compiled=lambda variant: {"D": variant.head_dim, "DP": pow2(variant.head_dim)},
    blocks={"row_block": "round.BR"},
)
