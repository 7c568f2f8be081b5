"""still::MatMulNBits: tokens times a 4- or 8-bit weight in blocks with scales."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from still_graphs.errors import ConfigError
from still_kernels.common.stateless import StatelessInputs, StatelessVariant, defined, keyed, stateless_op
from still_kernels.matmul_nbits.spec import MATMUL_NBITS
from still_kernels.plan import Branch, Check, Launch, Let, Loop, Plan, Region
from still_kernels.tile import SHARED_BYTES, KernelTile, TileTable

if TYPE_CHECKING:
    from torch import Tensor, dtype


WORD_BITS = 32


GROUP_ROWS = 8
"""Rows that share one read of the weight: columns of a matrix instruction."""
FEW = f"tokens <= {8 * GROUP_ROWS}"
"""So few rows that reading the weight for each group is cheaper than writing and reading it in half precision."""
SPANS = (4224, 8192)
"""Largest number of outputs of a GEMM of span 0 and 1; larger ones are span 2. An H200 runs span 0 with 16 outputs per program and two
programs of 8 warps per multiprocessor at once."""

PLAN = Plan(
    MATMUL_NBITS,
    key=keyed(
        bits="bits",
        block_size="block_size",
        zero_points="has(zero_points)",
        offsets="has(offsets)",
        aligned="O % 8 == 0",  # stores of 16 bytes
        span=f"0 if O <= {SPANS[0]} else 1 if O <= {SPANS[1]} else 2",  # fewer programs have more warps each
    ),
    constants=(
        "few_outputs",  # outputs of a program for few rows
        "unpack_outputs",
        "unpack_words",
        "row_block",
        "output_block",
        "dense_weights",  # weights in half precision at a time
    ),
    checks=(
        Check("super_block == 0", "super_block={super_block}; the kernels have 0: scales that are numbers."),
        Check("zero_code < 0", "zero_code={zero_code}; the kernels have the middle, which is -1."),
        Check("bits == 4 or bits == 8", "bits={bits}; the kernels have 4 and 8."),
        Check(
            "block_size > 0 and I % max(block_size, 1) == 0", "block_size={block_size} does not divide I={I} inputs."
        ),
        Check("IW * 32 == I * bits", "blocks have {IW} words for I={I} inputs of {bits} bits."),
        Check("IS * block_size == I", "scales are {IS} for I={I} inputs in blocks of {block_size}."),
        Check(
            "not has(zero_points) or IZ == ceil_div(IS * bits, 32)",
            "zero_points have {IZ} words for {IS} blocks of {bits} bits.",
        ),
    ),
    define={"part": "min(O, max(1, dense_weights // max(I, 1) // output_block) * output_block)"},
    workspace=(Region("dense", "T", ("part", "I"), f"not ({FEW})"),),
    arguments={"M": "tokens", "N": "O", "K": "I", "ZW": "IZ if has(zero_points) else 0"},
    steps=(
        Branch(
            FEW,
            (Launch("few", (f"ceil_div(tokens, {GROUP_ROWS})", "ceil_div(O, few_outputs)", "1")),),
            (
                Loop(
                    "first",
                    "0",
                    "O",
                    "part",
                    (
                        Let("count", "min(part, O - first)"),
                        Launch(
                            "unpack",
                            ("ceil_div(IW, unpack_words)", "ceil_div(count, unpack_outputs)", "1"),
                            first="first",
                            count="count",
                        ),
                        Launch(
                            "multiply",
                            ("ceil_div(tokens, row_block) * ceil_div(count, output_block)", "1", "1"),
                            first="first",
                            count="count",
                        ),
                    ),
                ),
            ),
        ),
    ),
)


@dataclass(frozen=True)
class Inputs(StatelessInputs, plan=PLAN):
    """Tensors and attributes of one call, as of the op's spec. offsets: Added to the numbers of each block; None: 0."""

    input: Tensor
    blocks: Tensor
    scales: Tensor
    zero_points: Tensor | None = None
    bits: int = 4
    block_size: int = 32
    offsets: Tensor | None = None
    zero_code: int = -1
    super_block: int = 0


def dequantized(inputs: Inputs) -> Tensor:
    """The weight scale * (code - zero point) + offset [O, I], rounded to the type of the activations."""
    import torch

    assert not inputs.super_block, "read by kernels for CPUs alone"
    outputs, blocks = inputs.scales.shape
    shifts = torch.arange(0, WORD_BITS, inputs.bits, dtype=torch.int32, device=inputs.blocks.device)
    most = (1 << inputs.bits) - 1
    codes = (inputs.blocks[..., None] >> shifts & most).view(outputs, blocks, inputs.block_size)
    zero: Tensor | int = inputs.zero_code if inputs.zero_code >= 0 else 1 << (inputs.bits - 1)
    if inputs.zero_points is not None:
        zero = (inputs.zero_points[..., None] >> shifts & most).view(outputs, -1)[:, :blocks, None]
    wide = torch.promote_types(inputs.scales.dtype, torch.float32)
    weight = (codes - zero).to(wide) * inputs.scales.to(wide)[..., None]
    if inputs.offsets is not None:
        weight += inputs.offsets.to(wide)[..., None]
    return weight.to(inputs.scales.dtype).view(outputs, -1)


@defined
def naive_matmul_nbits(inputs: Inputs, wide: dtype) -> Tensor:
    """Tokens times the transposed weight [B, T, O]."""
    return inputs.input.to(wide) @ dequantized(inputs).to(wide).T


@dataclass(frozen=True)
class Variant(StatelessVariant):
    """Properties that kernels are compiled for.

    zero_points, offsets: Whether they exist.
    aligned: Whether O is a multiple of 8, for 16-byte stores.
    span: Class of the number of outputs (SPANS).
    """

    DTYPES = ("float16",)  # codes become numbers through the bits of half precision
    bits: int = 4
    block_size: int = 32
    zero_points: int = 1
    aligned: int = 1
    span: int = 2
    offsets: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (4, 8):
            raise ConfigError(f"bits={self.bits} is unknown; known: 4, 8.")


DENSE_WEIGHTS = 1 << 26
"""Weights in half precision at a time: 128 MB, enough for several waves of blocks in GEMMs of 2,048 rows."""
WIDE_SHARED = 150 << 10
"""Shared memory of blocks of 128 x 256."""

FEW_TILES = {4: ((16, 8, 2, 1), (16, 4, 2, 1), (32, 2, 2, 0)), 8: ((16, 8, 2, 2), (16, 4, 4, 2), (32, 2, 2, 2))}
"""By bits and span: outputs, warps, units and prefetched steps (`gluon_few.few_kernel`) for few rows. Best of 84 and 22 on an H200 over the
linear layers of Llama-3.1-8B at one and at eight rows (docs/notebook/quantization.md)."""


def tile_table(variant: Variant, arch: int) -> TileTable:
    """Block sizes on an architecture (90 for sm_90)."""
    wide = variant.aligned and SHARED_BYTES[arch] >= WIDE_SHARED and arch >= 90
    sizes = (256, 128, 64, 3) if wide else (128, 128, 64, 3) if SHARED_BYTES[arch] >= WIDE_SHARED else (128, 128, 32, 3)
    few_outputs, warps, units, ahead = FEW_TILES[variant.bits][variant.span]
    few = {"BN": few_outputs, "SPLITS": warps, "UNITS": units, "AHEAD": ahead}
    rows, outputs, inner, stages = sizes
    tiles = {
        "few": KernelTile(few, warps),
        "unpack": KernelTile({"BN": 8, "BW": 64}, 4),
        "multiply": KernelTile({"BM": rows, "BN": outputs, "BK": inner, "GROUP": 8, "STAGES": stages}, 8, stages),
    }
    return TileTable(tiles, {"dense_weights": DENSE_WEIGHTS})


OP = stateless_op(
    PLAN,
    Variant,
    [
        Variant(bits=bits, zero_points=zero, span=span)
        for (bits, zero), span in product(((4, 1), (4, 0), (8, 0)), range(len(SPANS) + 1))
    ],
    tile_table,
    naive_matmul_nbits,
    module="still_kernels.matmul_nbits.kernels",
    covers="GEMMs with weights in blocks have",
    also=(
        Check("bits == 4 or bits == 8", "bits={bits}; the kernels have 4 and 8."),
        Check("block_size > 0 and block_size % 32 == 0", "block_size={block_size}; the kernels have multiples of 32."),
    ),
    compiled=lambda variant: {"BITS": variant.bits, "BLOCK": variant.block_size, "ALIGNED": variant.aligned},
    blocks={
        "few_outputs": "few.BN",
        "unpack_outputs": "unpack.BN",
        "unpack_words": "unpack.BW",
        "row_block": "multiply.BM",
        "output_block": "multiply.BN",
    },
    optional={"zero_points": "zero_points", "offsets": "offsets"},
)
