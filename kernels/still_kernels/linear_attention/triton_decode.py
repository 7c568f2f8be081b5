"""A few tokens per row in one launch. Programs share the state's columns; each reads and writes its own once."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import ROWS, rounded, row_of, wait_for_ahead
from still_kernels.linear_attention.triton_common import LEAST, state_of_head


@triton.jit(do_not_specialize=["T", "H", "HQ", "HK", "W"], do_not_specialize_on_alignment=ROWS)
def decode_kernel(
    p_query, p_key, p_value, p_decay, p_beta, p_recurrent_state, p_new_tokens, p_query_start, p_state_row, p_past_length,
    p_output,
    T, H, HQ, HK, W, scale,
    D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, G: tl.constexpr, DELTA: tl.constexpr,
    DECAY: tl.constexpr, RAGGED: tl.constexpr, PAGE: tl.constexpr, SETTLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Token after token on BV columns of one head's state, in float32. Grid (ceil(V / BV), H, B)."""
    wait_for_ahead(PDL, SETTLE)
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    row, start, _length, count = row_of(i_batch, p_new_tokens, None, p_query_start, p_state_row, T, RAGGED)
    o_dim = tl.arange(0, DP)
    o_column = tl.program_id(0) * BV + tl.arange(0, BV)
    m_dim = o_dim < D
    m_column = o_column < V
    p_query += (start * HQ + i_head // (H // HQ)) * G * D
    p_key += (start * HK + i_head // (H // HK)) * D
    p_value += (start * H + i_head) * V
    p_output += (start * H + i_head) * G * V
    if count > 0:
        m_state = m_dim[:, None] & m_column[None, :]
        p_state, m_known = state_of_head(
            p_recurrent_state, p_past_length, i_batch, row, i_head, H, 0, m_state, D, V, PAGE
        )
        p_state = p_state + o_dim[:, None] * V + o_column[None, :]
        b_state = tl.load(p_state, mask=m_known, other=0.0)
        for t in range(0, count):
            token = start * 0 + t
            b_key = tl.load(p_key + token * HK * D + o_dim, mask=m_dim, other=0.0).to(tl.float32)
            b_new = tl.load(p_value + token * H * V + o_column, mask=m_column, other=0.0).to(tl.float32)
            if DECAY == 1:
                b_state *= tl.exp(tl.maximum(tl.load(p_decay + (start + token) * H + i_head), LEAST))
            if DECAY == 2:
                p_gate = p_decay + ((start + token) * H + i_head) * D + o_dim
                b_state *= tl.exp(tl.maximum(tl.load(p_gate, mask=m_dim, other=0.0), LEAST))[:, None]
            if DELTA:
                b_step = tl.load(p_beta + (start + token) * W + tl.where(W > 1, i_head, 0))
                b_new = b_step * (b_new - tl.sum(rounded(b_state, b_key[:, None]), 0))
            b_state += b_key[:, None] * b_new[None, :]
            for g in range(G):
                b_query = tl.load(p_query + (token * HQ * G + g) * D + o_dim, mask=m_dim, other=0.0).to(tl.float32)
                b_out = scale * tl.sum(rounded(b_state, b_query[:, None]), 0)
                p_tile = p_output + (token * H * G + g) * V + o_column
                tl.store(p_tile, b_out.to(p_output.dtype.element_ty), mask=m_column)
        tl.store(p_state, b_state, mask=m_state)
    if not RAGGED:
        for t in range(count, T):  # padding
            for g in range(G):
                p_tile = p_output + ((start * 0 + t) * H * G + g) * V + o_column
                tl.store(p_tile, tl.zeros([BV], p_output.dtype.element_ty), mask=m_column)
