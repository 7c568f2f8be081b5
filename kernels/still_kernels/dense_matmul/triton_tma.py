"""Many rows times a weight, blocks of both copied by TMA: what lies beyond the last row, input or output is zero, so nothing is masked."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.dense_matmul.triton_products import corner_of, store_sum


@triton.jit
def copied_block(d_rows, d_weight, p_residual, p_output, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 GROUP: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Rows d_rows [M, K] times d_weight [K, N], plus p_residual [M, N] where there is one. Grid (ceil(M / BM) * ceil(N / BN))."""
    row, output = corner_of(tl.program_id(0), M, N, BM, BN, GROUP)
    b_sum = tl.zeros([BM, BN], tl.float32)
    for begin in tl.range(0, K, BK, num_stages=STAGES):
        b_sum = tl.dot(d_rows.load([row, begin]), d_weight.load([begin, output]), b_sum)
    store_sum(p_residual, p_output, b_sum, row + tl.arange(0, BM), output + tl.arange(0, BN), M, N)


@triton.jit(do_not_specialize=["M", "N", "K"])
def many_tma_kernel(d_rows, d_weight, p_residual, p_output, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                    GROUP: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """As copied_block."""
    N = N // 8 * 8  # which tells the compiler
    copied_block(d_rows, d_weight, p_residual, p_output, M, N, K, BM, BN, BK, GROUP, STAGES)
