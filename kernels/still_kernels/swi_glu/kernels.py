"""One launch for the gate of a feed-forward layer."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N"])
def swi_glu_kernel(p_input, p_output, N, BC: tl.constexpr, ALIGNED: tl.constexpr):
    """p_output [M, N] of the halves of p_input [M, 2 * N]. Grid (M, ceil(N / BC))."""
    if ALIGNED:
        N = N // 8 * 8  # which tells the compiler
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BC + tl.arange(0, BC)
    m_column = o_column < N
    p_gate = p_input + i_row * 2 * N + o_column
    b_gate = tl.load(p_gate, mask=m_column, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + N, mask=m_column, other=0.0).to(tl.float32)
    b_row = b_gate / (1 + tl.exp(-b_gate)) * b_up
    tl.store(p_output + i_row * N + o_column, b_row.to(p_output.dtype.element_ty), mask=m_column)


FUNCTIONS = {"swi_glu": swi_glu_kernel}
