"""Second step of a prompt: the state through the chunks, in one pass with a block of its columns in registers.

It has only what must be sequential: outputs follow from the states before the chunks and the delta rules' new values, which it leaves in
the workspace. With T = (I + A)^-1 diag(beta) new values are T (value - key S). The difference is computed first, in float32, so that a
memory that already stores its value loses no digits. T, whose entries may be large and of either sign, and the difference keep 16 bits, as
two bfloat16. With one bfloat16 the error of the outputs doubled (delta rule, beta up to 2).

Everything is transposed, [columns, ..]: a GEMM's left matrix can stay in registers from the GEMM before it, and the state and the new
values are always on the left.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import ROWS, row_of
from still_kernels.linear_attention.triton_common import EXACT, gemm_of_halves, halves, load_rows, state_of_head

LEAST_UNIT = tl.constexpr(1e-30)
"""Least divisor of a column of the state, so that its inverse is finite."""


@triton.jit(do_not_specialize=["T", "H", "HK", "first", "n_chunks"], do_not_specialize_on_alignment=ROWS)
def scan_kernel(
    p_key, p_value, p_recurrent_state, p_new_tokens, p_query_start, p_state_row, p_past_length, p_inverse, p_left, p_rest,
    p_taken, p_added, p_before, p_unit, p_new,
    T, H, HK, first, n_chunks,
    D: tl.constexpr, BD: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
    DELTA: tl.constexpr, DECAY: tl.constexpr, RAGGED: tl.constexpr, PAGE: tl.constexpr, NARROW: tl.constexpr,
    WIDE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """BV columns of one head's state through chunks first .. first + n_chunks - 1. Grid (ceil(V / BV) * ceil(D / BD), H, B).

    A program has BD channels of the keys; all of them with DELTA, which reads the state as it goes, and with NARROW.

    before [.., V, D]: the state before each chunk, rounded; new [.., V, C]: the delta rules' new values. NARROW (float16): states are
    divided by the largest value of each column, unit [.., V], as it may be beyond the type. WIDE: float32 activations.
    """
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    row, start, _length, count = row_of(i_batch, p_new_tokens, None, p_query_start, p_state_row, T, RAGGED)
    chunks = tl.minimum(n_chunks, (count + C - 1) // C - first)
    if chunks <= 0:
        return
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    o_dim = tl.program_id(0) // BLOCKS * BD + tl.arange(0, BD)
    o_column = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    o_inner = tl.arange(0, C)
    m_dim = (o_dim < D)[None, :]
    m_column = (o_column < V)[:, None]
    m_state = m_column & m_dim
    o_keys = o_inner[:, None] * D + o_dim[None, :]
    o_square = o_inner[:, None] * C + o_inner[None, :]
    o_before = o_column[:, None] * D + o_dim[None, :]
    o_new = o_column[:, None] * C + o_inner[None, :]
    KIND: tl.constexpr = p_value.dtype.element_ty
    i_first = i_batch.to(tl.int64) * n_chunks * H + i_head
    p_key += (start * HK + i_head // (H // HK)) * D
    p_value += (start * H + i_head) * V
    p_state, m_known = state_of_head(
        p_recurrent_state, p_past_length, i_batch, row, i_head, H, first, m_state, D, V, PAGE
    )
    p_state = p_state + o_dim[None, :] * V + o_column[:, None]
    b_state = tl.load(p_state, mask=m_known, other=0.0)
    # A GEMM with it transposes in the tensor cores; a trip through shared memory has eight barriers.
    b_one = tl.where(o_inner[:, None] == o_inner[None, :], 1.0, 0.0).to(KIND)
    # What is multiplied and not given to a GEMM nothing loads ahead, and a chunk would wait for it: it comes a chunk early.
    if DECAY == 1:
        left = tl.load(p_left + i_first * C + C - 1)
        b_rest = tl.load(p_rest + i_first * C + o_inner)
        if DELTA:
            b_left = tl.load(p_left + i_first * C + o_inner)
    if DECAY == 2:
        b_left = tl.load(p_left + i_first * D + o_dim, mask=o_dim < D, other=0.0)
    for c in tl.range(0, chunks, num_stages=STAGES):
        i_tile = i_first + c * H
        begin = (first + c) * C
        i_next = i_first + tl.minimum(c + 1, chunks - 1) * H
        if DECAY == 1:
            next_left = tl.load(p_left + i_next * C + C - 1)
            b_next_rest = tl.load(p_rest + i_next * C + o_inner)
            if DELTA:
                b_next_left = tl.load(p_left + i_next * C + o_inner)
        if DECAY == 2:
            b_next_left = tl.load(p_left + i_next * D + o_dim, mask=o_dim < D, other=0.0)
        b_value = load_rows(p_value, begin, count, H * V, o_inner, o_column, V)
        if DECAY == 2:
            b_added = tl.load(p_added + i_tile * (C * D) + o_keys, mask=m_dim, other=0.0)
        else:
            b_added = load_rows(p_key, begin, count, HK * D, o_inner, o_dim, D)
        if NARROW:
            b_most = tl.max(tl.abs(b_state), 1)
            b_unit = tl.where(b_most > LEAST_UNIT, b_most, 1.0)
            b_before = (b_state * (1.0 / b_unit)[:, None]).to(KIND)
            tl.store(p_unit + i_tile * V + o_column, b_unit, mask=o_column < V)
        else:
            b_before = b_state.to(KIND)
        if DELTA:
            if DECAY == 2:
                b_taken = tl.load(p_taken + i_tile * (C * D) + o_keys, mask=m_dim, other=0.0)
            else:
                b_taken = b_added
            b_known = tl.dot(b_before, tl.trans(b_taken), input_precision=DOT)
            if NARROW:
                b_known *= b_unit[:, None]
            if DECAY == 1:
                b_known *= b_left[None, :]
                b_left = b_next_left
            b_missing = tl.dot(tl.trans(b_value), b_one, input_precision=DOT) - b_known
            p_solution = p_inverse + i_tile * (C * C if WIDE else 2 * C * C) + o_square
            if WIDE:
                b_new = tl.dot(b_missing, tl.trans(tl.load(p_solution)), input_precision=EXACT)
            else:
                b_high, b_low = halves(b_missing)
                b_inverse = tl.trans(tl.load(p_solution))
                b_inverse_low = tl.trans(tl.load(p_solution + C * C))
                b_new = gemm_of_halves(b_high, b_low, b_inverse, b_inverse_low)
            tl.store(p_new + i_tile * (V * C) + o_new, b_new.to(KIND), mask=m_column)
        else:
            b_new = tl.trans(b_value)
        tl.store(p_before + i_tile * (V * D) + o_before, b_before, mask=m_state)
        if DECAY == 1:
            b_new = b_new.to(tl.float32) * b_rest[None, :]
            b_state *= left
            left = next_left
            b_rest = b_next_rest
        if DECAY == 2:
            b_state *= b_left[None, :]
            b_left = b_next_left
        b_state = tl.dot(b_new.to(KIND), b_added, b_state, input_precision=DOT)
    tl.store(p_state, b_state, mask=m_state)
