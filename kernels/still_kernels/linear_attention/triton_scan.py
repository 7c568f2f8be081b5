"""Second step of a prompt: the state through the chunks, by one pass over them with a block of its columns in registers.

Outputs leave with it: a chunk's products that do not wait for the state fill the time of those that do, and no chunk's state goes to
memory. With T = (I + A)^-1 diag(beta) the delta rules' new values are T (value - key S): the difference first, in float32, so that a
memory that holds what it is told loses no digits. T, whose entries may be large and of either sign, stays in float32 too: rounded to
bfloat16 it doubled the error of the outputs (delta rule, beta up to 2).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.linear_attention.triton_common import load_rows
from still_kernels.triton_shared import row_of


@triton.jit(do_not_specialize=["T", "H", "HQ", "HK", "first", "n_chunks"])
def scan_kernel(
    p_query,
    p_key,
    p_value,
    p_recurrent_state,
    p_new_tokens,
    p_query_start,
    p_state_row,
    p_scores,
    p_inverse,
    p_left,
    p_rest,
    p_asked,
    p_taken,
    p_added,
    p_output,
    T,
    H,
    HQ,
    HK,
    first,
    n_chunks,
    scale,
    D: tl.constexpr,
    DP: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    STAGES: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    RAGGED: tl.constexpr,
    NARROW: tl.constexpr,
    DOT: tl.constexpr,
    CORRECT: tl.constexpr,
):
    """Outputs of chunks first .. first + n_chunks - 1 of one head, BV columns; the state [D, BV] behind them. Grid (ceil(V / BV), H, B).

    NARROW (float16): products take the state divided by its largest value, which may be beyond the type.
    """
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    row, start, _length, count = row_of(i_batch, p_new_tokens, None, p_query_start, p_state_row, T, RAGGED)
    span = count if RAGGED else T
    o_dim = tl.arange(0, DP)
    o_column = tl.program_id(0) * BV + tl.arange(0, BV)
    o_inner = tl.arange(0, C)
    m_column = (o_column < V)[None, :]
    stride_out = H * G * V
    p_value += (start * H + i_head) * V
    p_output += (start * H + i_head) * G * V
    KIND: tl.constexpr = p_value.dtype.element_ty
    chunks = tl.maximum(0, tl.minimum(n_chunks, (count + C - 1) // C - first))
    if chunks > 0:
        i_first = i_batch.to(tl.int64) * n_chunks * H + i_head
        p_query += (start * HQ + i_head // (H // HQ)) * G * D
        p_key += (start * HK + i_head // (H // HK)) * D
        p_state = p_recurrent_state + (row * H + i_head) * (D * V) + o_dim[:, None] * V + o_column[None, :]
        m_state = (o_dim < D)[:, None] & m_column
        m_dim = (o_dim < D)[None, :]
        o_keys = o_inner[:, None] * D + o_dim[None, :]
        o_square = o_inner[:, None] * C + o_inner[None, :]
        b_state = tl.load(p_state, mask=m_state, other=0.0)
        for c in tl.range(0, chunks, num_stages=STAGES):
            i_tile = i_first + c * H
            o_token = (first + c) * C + o_inner
            m_token = o_token < count
            b_unit = 1.0
            if NARROW:
                b_most = tl.max(tl.max(tl.abs(b_state), 1), 0)
                b_unit = tl.where(b_most > 0, b_most, 1.0)
            b_past = (b_state / b_unit).to(KIND) if NARROW else b_state.to(KIND)
            b_new = load_rows(p_value, o_token, m_token, H * V, o_column, V)
            if DECAY == 1:
                b_left = tl.load(p_left + i_tile * C + o_inner)
                b_rest = tl.load(p_rest + i_tile * C + o_inner)
            if DECAY == 2:
                b_added = tl.load(p_added + i_tile * (C * D) + o_keys, mask=m_dim, other=0.0)
            else:
                b_added = load_rows(p_key, o_token, m_token, HK * D, o_dim, D)
            if DELTA:
                if DECAY == 2:
                    b_taken = tl.load(p_taken + i_tile * (C * D) + o_keys, mask=m_dim, other=0.0)
                else:
                    b_taken = b_added
                b_known = tl.dot(b_taken, b_past, input_precision=DOT) * b_unit
                if DECAY == 1:
                    b_known *= b_left[:, None]
                b_inverse = tl.load(p_inverse + i_tile * (C * C) + o_square)
                b_new = tl.dot(b_inverse, b_new.to(tl.float32) - b_known, input_precision=CORRECT)
            b_value = b_new.to(KIND)
            for g in tl.static_range(G):
                if DECAY == 2:
                    b_query = tl.load(p_asked + (i_tile * G + g) * (C * D) + o_keys, mask=m_dim, other=0.0)
                else:
                    b_query = load_rows(p_query + g * D, o_token, m_token, HQ * G * D, o_dim, D)
                b_out = tl.dot(b_query, b_past, input_precision=DOT) * (b_unit * scale)
                if DECAY == 1:
                    b_out *= b_left[:, None]
                b_scores = tl.load(p_scores + (i_tile * G + g) * (C * C) + o_square)
                b_out = tl.dot(b_scores, b_value, b_out, input_precision=DOT)
                p_tile = p_output + g * V + o_token.to(tl.int64)[:, None] * stride_out + o_column[None, :]
                tl.store(p_tile, b_out.to(KIND), mask=(o_token < span)[:, None] & m_column)
            if DECAY == 1:
                b_value = (b_new.to(tl.float32) * b_rest[:, None]).to(KIND)
                b_state *= tl.load(p_left + i_tile * C + C - 1)
            if DECAY == 2:
                b_state *= tl.load(p_left + i_tile * D + o_dim, mask=o_dim < D, other=0.0)[:, None]
            b_state = tl.dot(tl.trans(b_added), b_value, b_state, input_precision=DOT)
        tl.store(p_state, b_state, mask=m_state)
    for c in range(first + chunks, tl.minimum(first + n_chunks, (span + C - 1) // C)):  # padding
        o_token = c * C + o_inner
        for g in range(G):
            p_tile = p_output + g * V + o_token.to(tl.int64)[:, None] * stride_out + o_column[None, :]
            tl.store(p_tile, tl.zeros([C, BV], KIND), mask=(o_token < span)[:, None] & m_column)
