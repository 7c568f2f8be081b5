"""Device functions that the Triton kernels of several ops share."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

ROWS = ["p_past_length", "p_query_start", "p_state_row"]
"""Pointers to single values that kernels read. An engine passes parts of a batch with any alignment. Triton would compile each alignment
that it specializes on in the middle of the engine's work."""


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
        new_tokens = tl.load(p_new_tokens + i_batch).to(tl.int64)
        count = tl.minimum(tl.maximum(new_tokens, 0), T).to(tl.int32)
        row = i_batch.to(tl.int64)
    if p_past_length is None:
        length = count * 0
    else:
        past = tl.load(p_past_length + (i_batch if PAGED else row)).to(tl.int64)
        length = tl.minimum(tl.maximum(past, 0), 1 << 30).to(tl.int32)
    return row, start, length, count


@triton.jit
def wait_for_ahead(PDL: tl.constexpr, SETTLE: tl.constexpr):
    """First in a kernel that is launched before the one ahead has ended: wait for that; the next one may be launched meanwhile."""
    if PDL and SETTLE:  # not in the interpreter
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(p_row, o_byte, SETTLE: tl.constexpr):
    """Bring lines at `o_byte` of rows towards L2 without waiting for them. Nothing in the interpreter."""
    if SETTLE:
        p_line = p_row.to(tl.pointer_type(tl.int8), bitcast=True)[:, None] + o_byte[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p_line], dtype=tl.int32, is_pure=False, pack=1
        )


ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: floats near it are integers, halves round to even
ROUND_BITS = tl.constexpr(0x4B400000)  # bits of that float
STEPS = tl.constexpr(127.0)


@triton.jit
def to_codes(b_rows):
    """Rows [R, DP], zeros beyond their length, in 8 bits: codes int8 and scales [R] (`still_graphs.spec.CACHE`)."""
    b_wide = b_rows.to(tl.float32)
    b_most = tl.max(tl.abs(b_wide), 1)
    b_scale = tl.div_rn(b_most, b_most * 0.0 + STEPS)
    b_share = tl.div_rn(b_wide, tl.where(b_scale > 0, b_scale, 1.0)[:, None] + b_wide * 0.0)
    return ((b_share + ROUND) - ROUND).to(tl.int8), b_scale


@triton.jit
def floats_of(b_codes):
    """Codes int8 as float32, exactly, by integer addition: hardware converts integers at a fraction of the rate at which it adds."""
    return (b_codes.to(tl.int32) + ROUND_BITS).to(tl.float32, bitcast=True) - ROUND


# Four codes as floats 2^23 + 128 + code: each byte, its sign turned, below the bits of 2^23.
UNPACK = tl.constexpr(
    "{ .reg .b32 x; xor.b32 x, $4, 0x80808080; mov.b32 $0, 0x4B000000; prmt.b32 $1, x, $0, 0x7551; prmt.b32 $2, x, $0, 0x7552; "
    "prmt.b32 $3, x, $0, 0x7553; prmt.b32 $0, x, $0, 0x7550; }"
)
UNPACKED = tl.constexpr(8388736.0)


@triton.jit
def wide(b_rows, CODES: tl.constexpr, SETTLE: tl.constexpr):
    """Numbers or codes as float32; compiled, a code is one instruction and a difference (107 for 115 us with 8 rows of 65,536 tokens)."""
    if CODES and SETTLE:
        b_bits = tl.inline_asm_elementwise(UNPACK, "=&r,=&r,=&r,=&r,r", [b_rows], dtype=tl.int32, is_pure=True, pack=4)
        b_wide = b_bits.to(tl.float32, bitcast=True) - UNPACKED
    elif CODES:
        b_wide = floats_of(b_rows)
    else:
        b_wide = b_rows.to(tl.float32)
    return b_wide


@triton.jit
def as_numbers(b_rows, p_scale, o_row, m_row, KIND: tl.constexpr, CODES: tl.constexpr):
    """Rows as a state holds them, o_row from where its scales begin, as numbers of type KIND."""
    if CODES:
        b_scale = tl.load(p_scale + o_row, mask=m_row, other=0.0)
        b_rows = (floats_of(b_rows) * b_scale[:, None]).to(KIND)
    return b_rows


@triton.jit
def store_rows(p_rows, p_scale, o_row, b_rows, m_row, o_dim, D: tl.constexpr, CODES: tl.constexpr, o_scale=None):
    """Rows of D numbers, zeros beyond, to rows o_row of a state; their scales to o_scale where these lie otherwise."""
    mask = m_row[:, None] & (o_dim < D)[None, :]
    p_to = p_rows + o_row[:, None] * D + o_dim[None, :]
    if CODES:
        b_codes, b_scale = to_codes(b_rows)
        tl.store(p_to, b_codes, mask=mask)
        tl.store(p_scale + (o_row if o_scale is None else o_scale), b_scale, mask=m_row)
    else:
        tl.store(p_to, b_rows, mask=mask)


@triton.jit
def scales_at(p_scale, offset, CODES: tl.constexpr):
    """The scales' pointer moved by rows; where rows are numbers there is none, and what stands for it is used nowhere."""
    if CODES:
        found = p_scale + offset
    else:
        found = 0  # no function may return None: Triton 3.6 does not compile that
    return found


@triton.jit
def settle(b_acc, SETTLE: tl.constexpr):
    """b_acc, complete: the pipeliner then does not carry an unfinished matrix instruction into the next iteration.

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


@triton.jit
def ranked(b_number, o_place):
    """int64 whose order is that of numbers, and of equal ones that of places from behind; zeros of both signs are equal."""
    b_bits = (b_number.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)
    b_order = b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)
    return (b_order.to(tl.int64) << 32) | (0x7FFFFFFF - o_place).to(tl.int64)
