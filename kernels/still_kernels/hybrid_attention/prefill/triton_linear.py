"""Fourth step of prefill: the linear state's contribution to each new query, from stored states and the chunks after them."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import ROWS, row_of, scales_at
from still_kernels.hybrid_attention.triton_common import feature_pair, load_tokens, load_weight
from still_kernels.hybrid_attention.triton_pages import in_page


@triton.jit
def _pair(b_plus, b_minus, p_phi, m_key, P: tl.constexpr, PP: tl.constexpr, FEATURE: tl.constexpr, DOT: tl.constexpr):
    """Products of query features with the features of key rows, [rows, keys]; 0 for keys outside m_key."""
    F: tl.constexpr = 2 * P if FEATURE <= 1 else P
    o_feature = tl.arange(0, PP)
    p_row = p_phi + tl.arange(0, m_key.shape[0])[:, None] * F + o_feature[None, :]
    mask = m_key[:, None] & (o_feature < P)[None, :]
    b_dot = tl.dot(b_plus, tl.trans(tl.load(p_row, mask=mask, other=0.0)), input_precision=DOT)
    if FEATURE <= 1:
        b_key = tl.load(p_row + P, mask=mask, other=0.0)
        b_dot = tl.dot(b_minus, tl.trans(b_key), b_dot, input_precision=DOT)
    return b_dot


@triton.jit(do_not_specialize=["T", "H", "HK", "W_HEADS", "first_tile", "n_tiles"], do_not_specialize_on_alignment=ROWS)
def linear_kernel(
    p_query, p_value, p_feature_q_weight, p_window_value, p_window_value_scale, p_new_tokens, p_past_length, p_query_start,
    p_state_row, p_phi_k, p_prefix_kv, p_prefix_z, p_linear, p_linear_sum,
    T, H, HK, W_HEADS, first_tile, n_tiles,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DK: tl.constexpr, DS: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    KP: tl.constexpr, BM: tl.constexpr, TB: tl.constexpr, EVERY: tl.constexpr, STAGES: tl.constexpr, FEATURE: tl.constexpr,
    EVICT: tl.constexpr, RAGGED: tl.constexpr, PAGES: tl.constexpr, CODES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """phi(q)^T S and phi(q)^T z of chunks c0 + first_tile .. + n_tiles - 1. Grid (ceil(n_tiles * C / (BM * TB)), H, B).

    Writes linear [B, n_tiles, H, C, D] and linear_sum [B, n_tiles, H, C], nothing for chunks 0 and 1. S and z are stored for
    every EVERY-th chunk. With 2, a chunk between two of them has one more promoted chunk behind it: its keys enter through
    products of features, (phi(q) phi(k)^T) v, which is less work than storing and reading S. BM divides EVERY * C.
    """
    F: tl.constexpr = 2 * P if FEATURE <= 1 else P
    CR: tl.constexpr = C + KP if EVICT else C
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    row, start, length, count = row_of(
        i_batch, p_new_tokens, p_past_length, p_query_start, p_state_row, T, RAGGED, PAGES != 0
    )
    p_window_value = in_page(p_window_value, p_state_row, i_batch, 0, PAGES)
    if CODES:
        p_window_value_scale = in_page(p_window_value_scale, p_state_row, i_batch, 0, PAGES)
    end = length + count
    c0 = length // C + first_tile
    first_block = tl.program_id(0) * TB
    last_block = tl.minimum(first_block + TB, (tl.minimum(n_tiles * C, end - c0 * C) + BM - 1) // BM)
    if count == 0:
        return
    i_kv = i_head // (H // HK)
    o_row = tl.arange(0, BM)
    o_part = tl.arange(0, DK)
    o_feature = tl.arange(0, PP)
    o_key = tl.arange(0, C)
    m_feature = o_feature < P
    kind = p_prefix_kv.dtype.element_ty
    p_weight = p_feature_q_weight + (i_head % W_HEADS).to(tl.int64) * (P * D)
    b_weight = load_weight(p_weight, o_feature, o_part, P, D)
    for block in range(first_block, last_block):
        o_local = block * BM + o_row  # rows count from the first chunk of the segment
        group = block * BM // (EVERY * C)
        if c0 + (block * BM + BM - 1) // C >= 2:
            o_query = c0 * C + o_local
            m_row = (o_query >= length) & (o_query < end)
            p_q = p_query + ((start + o_query - length) * H + i_head)[:, None] * D
            b_direction = tl.zeros([BM, PP], tl.float32)
            b_square = tl.zeros([BM], tl.float32)
            for d in range(0, DP, DK):
                mask = m_row[:, None] & (d + o_part < D)[None, :]
                b_q = tl.load(p_q + d + o_part[None, :], mask=mask, other=0.0)
                if DK < DP:
                    b_weight = load_weight(p_weight, o_feature, d + o_part, P, D)
                b_direction = tl.dot(b_q, tl.trans(b_weight), b_direction, input_precision=DOT)
                b_wide = b_q.to(tl.float32)
                b_square += tl.sum(b_wide * b_wide, 1)
            b_plus, b_minus = feature_pair(b_direction, b_square, P, PP, FEATURE)
            groups = (n_tiles + EVERY - 1) // EVERY
            i_state = (i_batch.to(tl.int64) * groups + group) * H + i_head
            p_z = p_prefix_z + i_state * F + o_feature
            b_sum = tl.sum(b_plus * tl.load(p_z, mask=m_feature, other=0.0)[None, :], 1)
            if FEATURE <= 1:
                b_sum += tl.sum(b_minus * tl.load(p_z + P, mask=m_feature, other=0.0)[None, :], 1)
            b_plus = b_plus.to(kind)
            b_minus = b_minus.to(kind)

            # The chunk that was promoted after the stored state, for the rows behind it.
            between = c0 + group * EVERY + 1
            behind = (between >= 2) & (between * C >= length) & (between * C <= c0 * C + block * BM + BM - 1)
            b_pair = tl.zeros([BM, C], kind)
            if EVERY == 2:
                if behind:
                    tile = group * EVERY + 1
                    p_phi = p_phi_k + ((i_batch.to(tl.int64) * n_tiles + tile) * H + i_head) * (CR * F)
                    b_dot = _pair(b_plus, b_minus, p_phi, o_key >= 0, P, PP, FEATURE, DOT)
                    b_dot = tl.where((o_query >= between * C)[:, None], b_dot, 0.0)
                    b_sum += tl.sum(b_dot, 1)
                    b_pair = b_dot.to(kind)

            o_out = ((i_batch.to(tl.int64) * n_tiles + o_local // C) * H + i_head) * C + o_local % C
            m_out = o_local < n_tiles * C
            tl.store(p_linear_sum + o_out, b_sum, mask=m_out)
            p_new = p_value + (start * HK + i_kv) * D
            p_ring = p_window_value + (row * HK + i_kv) * (2 * C) * D
            p_ring_scale = scales_at(p_window_value_scale, (row * HK + i_kv) * (2 * C), CODES)
            p_kv = p_prefix_kv + i_state * (F * D) + o_feature[:, None] * D
            for d in tl.range(0, DP, DS, num_stages=STAGES):
                o_dim = d + tl.arange(0, DS)
                m_kv = m_feature[:, None] & (o_dim < D)[None, :]
                b_kv = tl.load(p_kv + o_dim[None, :], mask=m_kv, other=0.0)
                b_out = tl.dot(b_plus, b_kv, input_precision=DOT)
                if FEATURE <= 1:
                    b_kv = tl.load(p_kv + P * D + o_dim[None, :], mask=m_kv, other=0.0)
                    b_out = tl.dot(b_minus, b_kv, b_out, input_precision=DOT)
                if EVERY == 2:
                    o_position = tl.where(behind, (between - 2) * C + o_key, -1)
                    b_value = load_tokens(
                        p_new, p_ring, p_ring_scale, o_position, length, end, HK * D, o_dim, D, C, CODES
                    )
                    b_out = tl.dot(b_pair, b_value.to(kind), b_out, input_precision=DOT)
                p_out = p_linear + o_out[:, None] * D + o_dim[None, :]
                tl.store(p_out, b_out.to(kind), mask=m_out[:, None] & (o_dim < D)[None, :])
