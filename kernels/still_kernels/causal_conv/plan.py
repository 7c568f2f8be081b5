"""Kernels of still::CausalConv: launches, block sizes, variants. Imports neither torch nor Triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.op_kernels import TYPES, check_known, combinations, op_with_state, settling
from still_kernels.plan import Branch, Check, Launch, Plan
from still_kernels.tile import KernelTile, TileTable

MAX_TAPS = 16


@lru_cache
def tile_table(arch: int) -> TileTable:
    """The table of an architecture (90 for sm_90)."""
    dependent = arch >= 90
    tiles = {
        "conv": KernelTile({"BT": 16, "BC": 128}, 4, 1),
        "commit": KernelTile({"BC": 128}, 4, 1),
        "step": KernelTile({"BC": 128, "PDL": int(dependent)}, 4, 1, None, dependent),
    }
    return TileTable(tiles)


DECODE = "T <= 8"
"""So few tokens that one program of a channel processes all of them and the state."""

PLAN = Plan(
    CAUSAL_CONV,
    key={
        "dtype": "dtype",
        "taps": "K",
        "activation": "activation",
        "bias": "has(bias)",
        "aligned": "C % 8 == 0",  # loads of 16 bytes
        "count_dtype": "count_dtype",
    },
    constants=("token_block", "channel_block", "commit_block", "step_block"),
    checks=(
        Check(
            "dim(weight, 0) == C",
            "weight has taps of {dim(weight, 0)} channels, input C={C}; a grouped convolution is not covered.",
        ),
        Check("K >= 2 and P == K - 1", "K={K} taps need K - 1 columns of state, at least 1; it has P={P}."),
    ),
    arguments={"T": "T", "C": "C"},
    steps=(
        Branch(
            DECODE,
            (Launch("step", ("ceil_div(C, step_block)", "B", "1")),),
            (
                Launch("conv", ("ceil_div(T, token_block)", "ceil_div(C, channel_block)", "B")),
                Launch("commit", ("ceil_div(C, commit_block)", "B", "1")),
            ),
        ),
    ),
)


ACTIVATIONS = CAUSAL_CONV.attribute("activation").choices


@dataclass(frozen=True)
class Variant:
    """Properties that a set of kernels is compiled for; everything else is a run-time argument.

    taps: K.
    bias: Whether there is one.
    aligned: Whether C is a multiple of 8, for 16-byte loads.
    """

    dtype: str = "bfloat16"
    taps: int = 4
    activation: str = "silu"
    bias: int = 0
    aligned: int = 1
    count_dtype: str = "int64"

    def __post_init__(self) -> None:
        check_known(self, activation=ACTIVATIONS)


def constants_of(variant: Variant) -> dict[str, Any]:
    return {
        "K": variant.taps,
        "KP": 1 << (variant.taps - 2).bit_length(),  # columns of the state
        "ALIGNED": variant.aligned,
        "SILU": int(variant.activation == "silu"),
        **settling(),
    }


OP = op_with_state(
    PLAN,
    Variant,
    combinations(Variant, bias=(0, 1)),
    lambda variant, arch: tile_table(arch),
    constants_of,
    module="still_kernels.causal_conv.kernels",
    blocks={"token_block": "conv.BT", "channel_block": "conv.BC", "commit_block": "commit.BC", "step_block": "step.BC"},
    absent=lambda variant: () if variant.bias else ("bias",),
    covered=(
        TYPES,
        Check(f"K <= {MAX_TAPS}", f"{{K}} taps; the kernels have at most {MAX_TAPS}."),
    ),
)
KERNELS = OP.kernels
