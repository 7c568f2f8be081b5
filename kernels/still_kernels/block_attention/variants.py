"""What the kernels of still::BlockAttention are compiled for, and the `OpKernels` that says so to generic rooms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from still_kernels.block_attention.plan import PLAN
from still_kernels.block_attention.tiles import MAX_HEAD_DIM, tile_table
from still_kernels.op_kernels import DTYPES, Build, OpKernels, check_known, combinations, imported
from still_kernels.plan import Check
from still_kernels.tile import TileTable, pow2


@dataclass(frozen=True)
class Variant:
    """What a set of kernels is compiled for; everything else is a run-time argument.

    slots: Blocks of a token's list, filled up to a power of two.
    block_size: As of the op's spec.
    """

    dtype: str = "bfloat16"
    head_dim: int = 128
    slots: int = 128
    block_size: int = 64
    count_dtype: str = "int64"

    def __post_init__(self) -> None:
        check_known(self)


def constants_of(variant: Variant) -> dict[str, Any]:
    """Compile-time constants by name; each kernel takes those that it declares."""
    import triton

    return {
        "D": variant.head_dim,
        "DP": pow2(variant.head_dim),
        "SP": variant.slots,
        "BLOCK": variant.block_size,
        "BP": 1 << (variant.block_size - 1).bit_length(),
        "SETTLE": int(not triton.knobs.runtime.interpret),
        "DOT": "tf32x3" if variant.dtype == "float32" else "tf32",
    }


def build(variant: Variant, arch: int, table: TileTable | None = None) -> Build:
    """What a variant is on an architecture, or with other block sizes."""
    wide = variant.dtype == "float32"
    table = tile_table(arch, variant.head_dim, variant.block_size, wide) if table is None else table
    places = {
        "append_tokens": ("append", "BT"),
        "decode_heads": ("decode", "BR"),
        "most_parts": ("merge", "BS"),
        "attend_rows": ("attend", "BM"),
    }
    rows = {name: table.tiles[kernel].constants[constant] for name, (kernel, constant) in places.items()}
    return Build(table.kernels(), constants_of(variant), {**rows, **table.host})


KERNELS = OpKernels(
    plan=PLAN,
    variant=Variant,
    default_variants=combinations(Variant),
    build=build,
    functions=imported("still_kernels.block_attention.triton_blocks", "FUNCTIONS"),
    covered=(
        Check(f"dtype in {DTYPES}", f"dtype={{dtype}}; the kernels have {', '.join(DTYPES)}."),
        Check(f"D <= {MAX_HEAD_DIM}", f"head_dim={{D}}; the kernels have at most {MAX_HEAD_DIM}."),
        Check("H // HK <= 64", "{H // HK} query heads of a key/value head; the kernels have at most 64."),
    ),
)
