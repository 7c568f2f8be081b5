"""The launches of still::MatMulNBits: still_kernels.plan says what the parts mean. Integers and texts only: no torch, no Triton."""

from __future__ import annotations

from still_graphs.ops.matmul_nbits import MATMUL_NBITS
from still_kernels.plan import Branch, Check, Launch, Let, Loop, Plan, Region

GROUP_ROWS = 8
"""Rows that share what is read of the weight: columns of a matrix instruction."""
FEW = f"tokens <= {8 * GROUP_ROWS}"
"""So few rows that reading the weight for each group of them costs less than writing it as half precision numbers and reading those."""
SPANS = (4224, 8192)
"""Outputs up to which a product is of span 0 and 1; beyond them of span 2. Of span 0 an H200 holds 16 outputs in two programs of 8 warps a
multiprocessor."""

PLAN = Plan(
    MATMUL_NBITS,
    key={
        "dtype": "dtype",
        "bits": "bits",
        "block_size": "block_size",
        "zero_points": "has(zero_points)",
        "offsets": "has(offsets)",
        "aligned": "O % 8 == 0",  # stores of 16 bytes
        "span": f"0 if O <= {SPANS[0]} else 1 if O <= {SPANS[1]} else 2",  # of fewer programs each has more warps
        "count_dtype": "'int32'",  # there are no counts
    },
    constants=(
        "few_outputs",  # of one program of a few rows
        "unpack_outputs",
        "unpack_words",
        "row_block",
        "output_block",
        "dense_weights",  # that are half precision numbers at a time
    ),
    checks=(
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
