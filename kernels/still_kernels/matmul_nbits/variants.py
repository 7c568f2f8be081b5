"""What the kernels of still::MatMulNBits are compiled for, and the `OpKernels` that says so to generic rooms."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from still_graphs.errors import ConfigError
from still_kernels.matmul_nbits.plan import PLAN, SPANS
from still_kernels.matmul_nbits.tiles import tile_table
from still_kernels.op_kernels import COUNT_DTYPES, Build, OpKernels, imported
from still_kernels.plan import Check
from still_kernels.tile import TileTable

DTYPES = ("float16",)
"""Types of activations: codes become numbers by half precision's own bits."""
BITS = (4, 8)


@dataclass(frozen=True)
class Variant:
    """What a set of kernels is compiled for; everything else is a run-time argument.

    zero_points, offsets: Whether there are any.
    aligned: Whether outputs are a multiple of 8, which may be stored at once.
    span: How many there are (`plan.SPANS`).
    """

    dtype: str = "float16"
    bits: int = 4
    block_size: int = 32
    zero_points: int = 1
    aligned: int = 1
    span: int = 2
    offsets: int = 0
    count_dtype: str = "int32"

    def __post_init__(self) -> None:
        for name, known in (("dtype", DTYPES), ("bits", BITS), ("count_dtype", COUNT_DTYPES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown; known: {', '.join(map(str, known))}.")


def default_variants() -> list[Variant]:
    """Blocks of 32, 4 bits with zero points and without, 8 without."""
    return [
        Variant(bits=bits, zero_points=zero, span=span)
        for (bits, zero), span in itertools.product(((4, 1), (4, 0), (8, 0)), range(len(SPANS) + 1))
    ]


def plan_constants(table: TileTable) -> dict[str, int]:
    """Values of the plan's constants for kernels with these block sizes."""
    few, unpack, multiply = (table.tiles[name].constants for name in ("few", "unpack", "multiply"))
    return {
        "few_outputs": few["BN"],
        "unpack_outputs": unpack["BN"],
        "unpack_words": unpack["BW"],
        "row_block": multiply["BM"],
        "output_block": multiply["BN"],
        **table.host,
    }


def build(variant: Variant, arch: int, table: TileTable | None = None) -> Build:
    """What a variant is on an architecture, or with other block sizes."""
    table = tile_table(variant.bits, variant.aligned, variant.span, arch) if table is None else table
    constants = {"BITS": variant.bits, "BLOCK": variant.block_size, "ALIGNED": variant.aligned}
    absent = frozenset(name for name in ("zero_points", "offsets") if not getattr(variant, name))
    return Build(table.kernels(), constants, plan_constants(table), absent)


_COVERED = (
    Check(
        f"dtype in ({', '.join(map(repr, DTYPES))},)",
        f"activations are {{dtype}}; products with weights in blocks have kernels for {', '.join(DTYPES)}.",
    ),
    Check("bits == 4 or bits == 8", "bits={bits}; the kernels have 4 and 8."),
    Check("block_size > 0 and block_size % 32 == 0", "block_size={block_size}; the kernels have multiples of 32."),
)

KERNELS = OpKernels(
    plan=PLAN,
    variant=Variant,
    default_variants=default_variants,
    build=build,
    functions=imported("still_kernels.matmul_nbits.launch", "FUNCTIONS"),
    folder=Path(__file__).parent,
    covered=_COVERED,
    covered_ahead=_COVERED,
    work=imported("still_kernels.matmul_nbits.work", "WORK"),
)
