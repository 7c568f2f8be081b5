"""First step of prefill: the self-saliency of new tokens."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import LOG2E, ROWS, row_of, scales_at
from still_kernels.hybrid_attention.triton_common import RELEASED_EPSILON, load_tokens
from still_kernels.hybrid_attention.triton_pages import in_page


@triton.jit
def _own_window_logits(b_q, b_k, o_query, o_key, scale, C: tl.constexpr, DOT: tl.constexpr):
    """Logits of queries to a block of keys in log2 units; masks of the window without the own term, and of the own term."""
    b_logit = tl.dot(b_q, tl.trans(b_k), input_precision=DOT) * (scale * LOG2E)
    o_ahead = o_key[None, :] - o_query[:, None]
    m_others = (o_ahead < 0) & (o_ahead > -C) & (o_key >= 0)[None, :]
    return b_logit, m_others, o_ahead == 0


@triton.jit
def _keys(
    p_new, p_ring, p_ring_scale, first, length, end, stride, o_dim, D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """BM keys from position `first` on, as `load_tokens`; addresses are simple where all of them are the call's."""
    o_row = tl.arange(0, BM)
    if (first >= length) & (first + BM <= end):
        p_block = p_new + (first - length).to(tl.int64) * stride
        b_keys = tl.load(p_block + (o_row[:, None] * stride + o_dim[None, :]), mask=(o_dim < D)[None, :], other=0.0)
    else:
        b_keys = load_tokens(p_new, p_ring, p_ring_scale, first + o_row, length, end, stride, o_dim, D, C, CODES)
    return b_keys


@triton.jit(do_not_specialize=["T", "H", "HK"], do_not_specialize_on_alignment=ROWS)
def score_kernel(
    p_query, p_key, p_window_key, p_window_key_scale, p_new_tokens, p_past_length, p_query_start, p_state_row, p_score,
    T, H, HK, scale,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, RELEASED: tl.constexpr,
    RAGGED: tl.constexpr, PAGES: tl.constexpr, CODES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Scores of the call's tokens, score [tokens, H]. Grid (tiles * C / BM, HK, B): chunk length // C + i, rows in blocks of BM.

    The query heads of a key head are taken one after the other: they share its blocks of keys.
    """
    SUB: tl.constexpr = C // BM
    i_tile = tl.program_id(0) // SUB
    i_kv = tl.program_id(1)
    i_batch = tl.program_id(2)
    row, start, length, count = row_of(
        i_batch, p_new_tokens, p_past_length, p_query_start, p_state_row, T, RAGGED, PAGES != 0
    )
    p_window_key = in_page(p_window_key, p_state_row, i_batch, 0, PAGES)
    if CODES:
        p_window_key_scale = in_page(p_window_key_scale, p_state_row, i_batch, 0, PAGES)
    end = length + count
    chunk = length // C + i_tile
    first = chunk * C + (tl.program_id(0) % SUB) * BM
    if count == 0 or first >= end or first + BM <= length:
        return
    p_new = p_key + (start * HK + i_kv) * D
    p_ring = p_window_key + (row * HK + i_kv) * (2 * C) * D
    p_ring_scale = scales_at(p_window_key_scale, (row * HK + i_kv) * (2 * C), CODES)
    o_row = tl.arange(0, BM)
    o_dim = tl.arange(0, DP)
    o_query = first + o_row
    b_own_key = _keys(p_new, p_ring, p_ring_scale, first, length, end, HK * D, o_dim, D, C, BM, CODES)
    b_last_key = b_own_key
    if SUB == 1:
        b_last_key = _keys(p_new, p_ring, p_ring_scale, first - BM, length, end, HK * D, o_dim, D, C, BM, CODES)

    o_token = start + o_query - length
    m_query = (o_query >= length) & (o_query < end)
    for i_head in tl.range(i_kv * (H // HK), (i_kv + 1) * (H // HK), num_stages=STAGES):
        p_q = p_query + (o_token * H + i_head)[:, None] * D + o_dim[None, :]
        b_q = tl.load(p_q, mask=m_query[:, None] & (o_dim < D)[None, :], other=0.0)

        # Blocks from the own one backwards: keys before the query; all; keys after its place. Blocks before position 0 count nothing.
        b_own = tl.zeros([BM], tl.float32)
        b_max = tl.full([BM], -1.0e30, tl.float32)
        b_sum = tl.zeros([BM], tl.float32)
        b_k = b_own_key
        scale2 = scale * LOG2E
        for j in tl.static_range(0, SUB + 1):
            if j > 0:
                b_k = (
                    b_last_key
                    if SUB == 1
                    else _keys(p_new, p_ring, p_ring_scale, first - j * BM, length, end, HK * D, o_dim, D, C, BM, CODES)
                )
            b_dot = tl.dot(b_q, tl.trans(b_k), input_precision=DOT)
            if j == 0:
                b_own = tl.sum(tl.where(o_row[None, :] == o_row[:, None], b_dot, 0.0), 1) * scale2
                b_dot = tl.where(o_row[None, :] < o_row[:, None], b_dot, float("-inf"))
            elif j == SUB:
                b_dot = tl.where((o_row[None, :] > o_row[:, None]) & (first >= C), b_dot, float("-inf"))
            else:
                b_dot = tl.where(first >= j * BM, b_dot, float("-inf"))
            b_new = tl.maximum(b_max, tl.max(b_dot, 1) * scale2)
            b_p = tl.exp2(b_dot * scale2 - b_new[:, None])
            b_sum = b_sum * tl.exp2(b_max - b_new) + tl.sum(b_p, 1)
            b_max = b_new
        if RELEASED:
            b_score = tl.zeros([BM], tl.float32)
            b_seen = tl.zeros([BM], tl.float32)
            b_has_last = tl.zeros([BM], tl.int32)
            b_all = tl.maximum(b_max, b_own)
            b_total = b_sum * tl.exp2(b_max - b_all) + tl.exp2(b_own - b_all)
            b_k = b_own_key
            for j in tl.static_range(0, SUB + 1):
                o_key = o_query - j * BM
                if j > 0:
                    b_k = (
                        b_last_key
                        if SUB == 1
                        else _keys(
                            p_new, p_ring, p_ring_scale, first - j * BM, length, end, HK * D, o_dim, D, C, BM, CODES
                        )
                    )
                b_logit, m_others, m_own = _own_window_logits(b_q, b_k, o_query, o_key, scale, C, DOT)
                m_seen = m_others | m_own
                b_p = tl.where(m_seen, tl.exp2(b_logit - b_all[:, None]), 0.0) / b_total[:, None]
                b_without = tl.where(m_others, tl.exp2(b_logit - b_max[:, None]), 0.0) / b_sum[:, None]
                b_p = (b_p + RELEASED_EPSILON) / (1 + C * RELEASED_EPSILON)
                b_without = (b_without + RELEASED_EPSILON) / (1 + C * RELEASED_EPSILON + 1.0 / C)
                m_last = ((o_key & (C - 1)) == C - 1)[None, :]
                b_without = tl.where(m_last, 1.0 / C + RELEASED_EPSILON, b_without)
                b_term = b_p * tl.log(b_p / (b_without + RELEASED_EPSILON))
                b_score += tl.sum(tl.where(m_seen, b_term, 0.0), 1)
                b_seen += tl.sum(m_seen.to(tl.float32), 1)
                b_has_last += tl.sum((m_seen & m_last).to(tl.int32), 1)
            # Slots without a token count once each, slot C-1 with its constant.
            empty_p = RELEASED_EPSILON / (1 + C * RELEASED_EPSILON)
            empty_q = RELEASED_EPSILON / (1 + C * RELEASED_EPSILON + 1.0 / C)
            b_absent = C - b_seen - tl.where(b_has_last == 0, 1.0, 0.0)
            b_score += b_absent * (empty_p * tl.log(tl.full([BM], empty_p / (empty_q + RELEASED_EPSILON), tl.float32)))
            b_lone = empty_p * tl.log(tl.full([BM], empty_p / (1.0 / C + 2 * RELEASED_EPSILON), tl.float32))
            b_score += tl.where(b_has_last == 0, b_lone, 0.0)
        else:
            b_score = (b_own - b_max - tl.log2(b_sum)) / LOG2E
        b_score = tl.where(o_query == 0, float("inf"), b_score)
        tl.store(p_score + o_token * H + i_head, b_score, mask=m_query)
