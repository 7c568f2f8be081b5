"""One launch for a sum and its norm, with a program for each token."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sums_of(p_input, p_residual, o_column, m_column):
    """Sums of o_column, or inputs where there is no residual, rounded as they are stored, in float32."""
    b_x = tl.load(p_input + o_column, mask=m_column, other=0.0).to(tl.float32)
    if p_residual is not None:
        b_x += tl.load(p_residual + o_column, mask=m_column, other=0.0).to(tl.float32)
    return b_x.to(p_input.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["K"])
def add_norm_kernel(p_input, p_residual, p_norm_weight, p_sum, p_output, K, epsilon, BC: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """p_sum [M, K] of p_input and p_residual [M, K], and p_output [M, K], its norm times p_norm_weight [K]. Grid (M)."""
    if ALIGNED:
        K = K // 8 * 8  # which tells the compiler
    first = tl.program_id(0).to(tl.int64) * K
    o_column = tl.arange(0, BC)
    b_squares = tl.zeros([BC], tl.float32)
    for begin in range(0, K, BC):
        m_column = o_column < K - begin
        b_sum = sums_of(p_input, p_residual, first + begin + o_column, m_column)
        tl.store(p_sum + first + begin + o_column, b_sum.to(p_sum.dtype.element_ty), mask=m_column)
        b_squares += b_sum * b_sum
    scale = 1 / tl.sqrt(tl.sum(b_squares, 0) / K + epsilon)
    for begin in range(0, K, BC):
        m_column = o_column < K - begin
        b_sum = sums_of(p_input, p_residual, first + begin + o_column, m_column)
        b_weight = tl.load(p_norm_weight + begin + o_column, mask=m_column, other=0.0).to(tl.float32)
        b_row = (b_sum * scale * b_weight).to(p_output.dtype.element_ty)
        tl.store(p_output + first + begin + o_column, b_row, mask=m_column)


FUNCTIONS = {"add_norm": add_norm_kernel}
