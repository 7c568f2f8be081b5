"""What the kernels of still::CausalConv are compiled for, and the `OpKernels` that says so to generic rooms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from still_graphs.ops.causal_conv import CAUSAL_CONV
from still_kernels.causal_conv.plan import PLAN
from still_kernels.causal_conv.tiles import MAX_TAPS, tile_table
from still_kernels.op_kernels import DTYPES, Build, OpKernels, check_known, combinations, imported
from still_kernels.plan import Check
from still_kernels.tile import TileTable

ACTIVATIONS = CAUSAL_CONV.attribute("activation").choices


@dataclass(frozen=True)
class Variant:
    """What a set of kernels is compiled for; everything else is a run-time argument.

    taps: K.
    bias: Whether there is one.
    aligned: Whether channels are a multiple of 8, which may be loaded at once.
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
    """Compile-time constants by name; each kernel takes those that it declares."""
    import triton

    return {
        "K": variant.taps,
        "KP": 1 << (variant.taps - 2).bit_length(),  # columns of the state
        "ALIGNED": variant.aligned,
        "SILU": int(variant.activation == "silu"),
        "SETTLE": int(not triton.knobs.runtime.interpret),
    }


def plan_constants(table: TileTable) -> dict[str, int]:
    """Values of the plan's constants for kernels with these block sizes."""
    conv, commit, step = (table.tiles[name].constants for name in ("conv", "commit", "step"))
    return {
        "token_block": conv["BT"],
        "channel_block": conv["BC"],
        "commit_block": commit["BC"],
        "step_block": step["BC"],
    }


def build(variant: Variant, arch: int, table: TileTable | None = None) -> Build:
    """What a variant is on an architecture, or with other block sizes."""
    table = tile_table(arch) if table is None else table
    return Build(
        table.kernels(),
        constants_of(variant),
        plan_constants(table),
        frozenset(() if variant.bias else {"bias"}),
    )


KERNELS = OpKernels(
    plan=PLAN,
    variant=Variant,
    default_variants=combinations(Variant, bias=(0, 1)),
    build=build,
    functions=imported("still_kernels.causal_conv.functions", "FUNCTIONS"),
    covered=(
        Check(f"dtype in {DTYPES}", f"dtype={{dtype}}; the kernels have {', '.join(DTYPES)}."),
        Check(f"K <= {MAX_TAPS}", f"{{K}} taps; the kernels have at most {MAX_TAPS}."),
    ),
)
