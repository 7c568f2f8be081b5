"""Third step of a prompt: all chunks' outputs at once, from the states before them and the new values."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import ROWS, row_of
from still_kernels.linear_attention.triton_common import decay_between, load_rows, log_decay_of_heads, sums_of_decay

LARGEST = tl.constexpr(32768.0)
"""Largest product of queries and keys in float16."""


@triton.jit(do_not_specialize=["T", "H", "HQ", "HK", "first", "n_chunks"], do_not_specialize_on_alignment=ROWS)
def output_kernel(
    p_query, p_key, p_value, p_decay, p_new_tokens, p_query_start, p_state_row, p_scores, p_asked, p_before, p_unit, p_new,
    p_output,
    T, H, HQ, HK, first, n_chunks, scale,
    D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, G: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr,
    DECAY: tl.constexpr, RAGGED: tl.constexpr, NARROW: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Chunk `first` + i of one head, BV columns. Grid (n_chunks * ceil(V / BV), H, B); blocks of one chunk are neighbours."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    i_chunk = tl.program_id(0) // BLOCKS
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    _row, start, _length, count = row_of(i_batch, p_new_tokens, None, p_query_start, p_state_row, T, RAGGED)
    span = count if RAGGED else T
    begin = (first + i_chunk) * C
    if begin >= span:
        return
    o_dim = tl.arange(0, DP)
    o_column = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    o_inner = tl.arange(0, C)
    m_dim = (o_dim < D)[None, :]
    m_column = o_column < V
    m_output = (o_inner < span - begin)[:, None] & m_column[None, :]
    KIND: tl.constexpr = p_output.dtype.element_ty
    p_output += ((start + begin) * H + i_head) * G * V + (o_inner[:, None] * (H * G * V) + o_column[None, :])
    if begin >= count:  # padding
        for g in range(G):
            tl.store(p_output + g * V, tl.zeros([C, BV], KIND), mask=m_output)
        return
    i_tile = (i_batch.to(tl.int64) * n_chunks + i_chunk) * H + i_head
    p_query += (start * HQ + i_head // (H // HQ)) * G * D
    o_before = o_column[:, None] * D + o_dim[None, :]
    b_before = tl.trans(tl.load(p_before + i_tile * (V * D) + o_before, mask=m_column[:, None] & m_dim, other=0.0))
    if DELTA:
        o_new = o_column[:, None] * C + o_inner[None, :]
        b_new = tl.trans(tl.load(p_new + i_tile * (V * C) + o_new, mask=m_column[:, None], other=0.0))
    else:
        b_new = load_rows(p_value + (start * H + i_head) * V, begin, count, H * V, o_inner, o_column, V)
    if DECAY < 2:
        p_key += (start * HK + i_head // (H // HK)) * D
        b_key = load_rows(p_key, begin, count, HK * D, o_inner, o_dim, D)
    if DECAY == 1:
        b_decay = log_decay_of_heads(p_decay + start * H + i_head, begin, count, H, o_inner)
        b_high, b_low, _behind = sums_of_decay(b_decay)
        b_left = tl.exp(b_high)
        b_between = decay_between(b_high, b_low)
    for g in tl.static_range(G):
        if DECAY == 2:
            p_tile = p_asked + (i_tile * G + g) * (C * D)
            b_query = tl.load(p_tile + o_inner[:, None] * D + o_dim[None, :], mask=m_dim, other=0.0)
        else:
            b_query = load_rows(p_query + g * D, begin, count, HQ * G * D, o_inner, o_dim, D)
        b_output = tl.dot(b_query, b_before, input_precision=DOT) * scale
        if NARROW:
            b_output *= tl.load(p_unit + i_tile * V + o_column, mask=m_column, other=0.0)[None, :]
        if DECAY == 1:
            b_output *= b_left[:, None]
        if DECAY == 2:
            b_scores = tl.load(p_scores + (i_tile * G + g) * (C * C) + o_inner[:, None] * C + o_inner[None, :])
        else:
            b_products = tl.dot(b_query, tl.trans(b_key), input_precision=DOT)
            if DECAY == 1:
                b_products *= b_between
            b_scores = tl.where(o_inner[:, None] >= o_inner[None, :], b_products * scale, 0.0)
            if NARROW:  # products of features may be beyond the type, as the state
                b_most = tl.maximum(tl.max(tl.abs(b_scores), 1) * (1.0 / LARGEST), 1.0)
                b_scores *= (1.0 / b_most)[:, None]
                b_output *= (1.0 / b_most)[:, None]
            b_scores = b_scores.to(KIND)
        b_output = tl.dot(b_scores, b_new, b_output, input_precision=DOT)
        if NARROW and DECAY < 2:
            b_output *= b_most[:, None]
        tl.store(p_output + g * V, b_output.to(KIND), mask=m_output)
