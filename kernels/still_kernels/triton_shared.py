"""Device functions that the Triton kernels of several ops share."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

ROWS = ["p_past_length", "p_query_start", "p_state_row"]
"""Pointers of which kernels read single values: an engine gives parts of a batch, which begin anywhere, and each alignment that Triton
specializes on would be compiled in the middle of its work."""


@triton.jit
def row_of(
    i_batch, p_new_tokens, p_past_length, p_query_start, p_state_row, T, RAGGED: tl.constexpr, PAGED: tl.constexpr = False
):  # fmt: skip
    """Where one sequence lies: (state row, index of its first packed token, length before the call, new tokens).

    p_past_length: None for ops that need no length, which is 0 then.
    PAGED: States lie in pages that p_state_row is a table of; pointers are moved to them, where the row is 0.

    Lengths and counts are clamped: a TensorRT builder times kernels on garbage, which must stay within its buffers. Lengths are those of
    the states' rows; where these lie in pages, of the call's rows.
    """
    if RAGGED:
        start = tl.load(p_query_start + i_batch).to(tl.int64)
        count = (tl.load(p_query_start + i_batch + 1).to(tl.int64) - start).to(tl.int32)
        if PAGED:
            row = start * 0
        else:
            row = tl.load(p_state_row + i_batch).to(tl.int64)
    else:
        start = i_batch.to(tl.int64) * T
        given = tl.load(p_new_tokens + i_batch).to(tl.int64)
        count = tl.minimum(tl.maximum(given, 0), T).to(tl.int32)
        row = i_batch.to(tl.int64)
    if p_past_length is None:
        length = count * 0
    else:
        past = tl.load(p_past_length + (i_batch if PAGED else row)).to(tl.int64)
        length = tl.minimum(tl.maximum(past, 0), 1 << 30).to(tl.int32)
    return row, start, length, count


@triton.jit
def settle(b_acc, SETTLE: tl.constexpr):
    """b_acc, complete: the pipeliner then does not carry an unfinished matrix product into the next iteration.

    Left alone it does, and ptxas (12.8 to 13.0, C7515) answers by waiting after every matrix instruction of the kernel.
    No instruction at all, output tied to input: a move would stay in the machine code, one per register of the accumulator.
    Off in the interpreter, which has no inline assembly.
    """
    if SETTLE:
        return tl.inline_asm_elementwise("", "=f,0", [b_acc], dtype=tl.float32, is_pure=True, pack=1)
    return b_acc


@triton.jit
def rounded(b_x, b_y):
    """b_x * b_y for a sum over lanes. A plain product may enter the first addition unrounded, in each lane its own one.

    Lanes then disagree about the sum in its last bit, and copies of what is computed from it about what they store.
    """
    return tl.fma(b_x, b_y, 0.0)


@triton.jit
def absorb(b_acc, b_max, b_sum, b_dot, b_v, scale2, SETTLE: tl.constexpr, DOT: tl.constexpr):
    """A block of dot products [BM, BN] (-inf = masked) into the running softmax; b_max ends as the true maximum.

    scale2 > 0 takes dot products to logits in log2 units; it is applied within the exponent's multiply-add.
    """
    b_new = tl.maximum(b_max, tl.max(b_dot, 1) * scale2)
    b_p = tl.exp2(b_dot * scale2 - b_new[:, None])
    b_decay = tl.exp2(b_max - b_new)
    b_sum = b_sum * b_decay + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision=DOT)
    b_acc = settle(b_acc, SETTLE)
    return b_acc, b_new, b_sum
