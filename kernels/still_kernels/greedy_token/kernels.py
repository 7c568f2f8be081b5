"""One launch for the likeliest tokens, with a program for each row of logits."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import ranked


@triton.jit(do_not_specialize=["V"])
def greedy_kernel(p_logits, p_token, V, BC: tl.constexpr, ALIGNED: tl.constexpr):
    """p_token [M] of p_logits [M, V], -1 where a logit is NaN or the largest is infinite. Grid (M)."""
    if ALIGNED:
        V = V // 8 * 8  # which tells the compiler
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.arange(0, BC)
    b_best = ranked(tl.full([BC], float("-inf"), tl.float32), o_column)
    for begin in range(0, V, BC):
        o_token = begin + o_column
        b_logit = tl.load(p_logits + i_row * V + o_token, mask=o_token < V, other=float("-inf")).to(tl.float32)
        b_logit = tl.where(b_logit < float("inf"), b_logit, float("inf"))  # NaN of both signs too
        b_best = tl.maximum(b_best, ranked(b_logit, o_token))
    best = tl.max(b_best, 0)
    finite = ((best >> 32) < 0x7F800000) & ((best >> 32) > -0x7F800001)  # in the order of `ranked`
    tl.store(p_token + i_row, tl.where(finite, 0x7FFFFFFF - (best & 0x7FFFFFFF), -1).to(tl.int32))


FUNCTIONS = {"greedy": greedy_kernel}
