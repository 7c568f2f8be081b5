"""One launch for the likeliest tokens, a program for each row of logits."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import ranked


@triton.jit(do_not_specialize=["V"])
def greedy_kernel(p_logits, p_token, V, BC: tl.constexpr, ALIGNED: tl.constexpr):
    """p_token [M] of p_logits [M, V]. Grid (M)."""
    if ALIGNED:
        V = V // 8 * 8  # which tells the compiler
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.arange(0, BC)
    b_best = ranked(tl.full([BC], float("-inf"), tl.float32), o_column)
    for begin in range(0, V, BC):
        o_token = begin + o_column
        b_logit = tl.load(p_logits + i_row * V + o_token, mask=o_token < V, other=float("-inf"))
        b_best = tl.maximum(b_best, ranked(b_logit, o_token))
    tl.store(p_token + i_row, (0x7FFFFFFF - (tl.max(b_best, 0) & 0x7FFFFFFF)).to(tl.int32))


FUNCTIONS = {"greedy": greedy_kernel}
