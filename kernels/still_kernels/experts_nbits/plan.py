"""still::ExpertsNBits: the kernels of still::Experts over words of codes; its definition is `meaning.py`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from still_kernels.common.grouped_plan import GroupedVariant, grouped_op, grouped_plan
from still_kernels.experts_nbits.spec import EXPERTS_NBITS
from still_kernels.op_kernels import HALVES, later
from still_kernels.plan import Check


def _words(matrix: str, inputs: str, symbol: str) -> tuple[Check, Check]:
    return (
        Check(f"{symbol}W * 32 == {inputs} * bits", f"{matrix} has {{{symbol}W}} words for {{{inputs}}} inputs of {{bits}} bits."),
        Check(
            f"not has({matrix}_zero_points) or {symbol}Z == ceil_div({symbol}S * bits, 32)",
            f"{matrix}_zero_points has {{{symbol}Z}} words for {{{symbol}S}} blocks of {{bits}} bits.",
        ),
    )  # fmt: skip


PLAN = grouped_plan(
    EXPERTS_NBITS,
    "MS * block_size",
    {"bits": "bits", "block_size": "block_size", "zero_points": "has(gate_up_zero_points)"},
    (
        Check("bits == 4 or bits == 8", "bits={bits}; the kernels have 4 and 8."),
        Check("block_size > 0 and IS * block_size == I", "{IS} blocks of {block_size} for I={I} inputs."),
        Check("has(gate_up_zero_points) == has(down_zero_points)", "zero points of one matrix, and none of the other."),
        *_words("gate_up", "I", "I"),
        *_words("down", "MS * block_size", "M"),
    ),
    codes=True,
)


@dataclass(frozen=True)
class Variant(GroupedVariant):
    """As of `GroupedVariant`; zero_points: whether there are any."""

    bits: int = 4
    block_size: int = 32
    zero_points: int = 1


OP = grouped_op(
    PLAN,
    Variant,
    [Variant(dtype, zero_points=zero) for dtype, zero in product(HALVES, (1, 0))],
    later("still_kernels.experts_nbits.meaning", "naive_experts_nbits"),
    covers="experts have",
    module="still_kernels.experts_nbits.gluon_few",
    also=(
        Check("bits == 4 or bits == 8", "bits={bits}; the kernels have 4 and 8."),
        Check("block_size > 0 and block_size % 32 == 0", "block_size={block_size}; the kernels have multiples of 32."),
    ),
    optional={"gate_up_zero_points": "zero_points", "down_zero_points": "zero_points"},
)
