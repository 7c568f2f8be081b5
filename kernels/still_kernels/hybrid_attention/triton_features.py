"""Third step of prefill: features of the queries and of the keys that are folded into the linear state."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.hybrid_attention.triton_common import (
    feature_minus,
    feature_plus,
    feature_stats,
    load_tokens,
    load_weight,
    row_of,
)


@triton.jit
def _write_features(
    b_x, b_weight, m_row, p_out, P: tl.constexpr, PP: tl.constexpr, FEATURE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Features of a block of rows to `p_out` [rows, F], rows outside m_row as 0; sums over the rows, [PP] each half."""
    F: tl.constexpr = 2 * P if FEATURE <= 1 else P
    o_feature = tl.arange(0, PP)
    m_feature = o_feature < P
    o_row = tl.arange(0, b_x.shape[0])
    b_direction = tl.dot(b_x, tl.trans(b_weight), input_precision=DOT)
    b_wide = b_x.to(tl.float32)
    b_scale, b_plus, b_minus = feature_stats(b_direction, tl.sum(b_wide * b_wide, 1), m_feature, FEATURE)
    b_phi = tl.where(m_row[:, None], feature_plus(b_direction, b_scale, b_plus, m_feature, FEATURE), 0.0)
    p_block = p_out + o_row[:, None] * F + o_feature[None, :]
    tl.store(p_block, b_phi.to(p_out.dtype.element_ty), mask=m_feature[None, :])
    b_sum_plus = tl.sum(b_phi, 0)
    b_sum_minus = tl.zeros([PP], tl.float32)
    if FEATURE <= 1:
        b_phi = tl.where(m_row[:, None], feature_minus(b_direction, b_scale, b_minus, m_feature), 0.0)
        tl.store(p_block + P, b_phi.to(p_out.dtype.element_ty), mask=m_feature[None, :])
        b_sum_minus = tl.sum(b_phi, 0)
    return b_sum_plus, b_sum_minus


@triton.jit(do_not_specialize=["T", "H", "HK", "HS", "W_HEADS", "R", "first_tile", "n_tiles"])
def features_kernel(
    p_query,
    p_key,
    p_feature_q_weight,
    p_feature_k_weight,
    p_window_key,
    p_new_tokens,
    p_past_length,
    p_query_start,
    p_state_row,
    p_flags,
    p_evicted_key,
    p_evicted_count,
    p_phi_q,
    p_phi_k,
    p_mass,
    T,
    H,
    HK,
    HS,
    W_HEADS,
    R,
    first_tile,
    n_tiles,
    C: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,
    RB: tl.constexpr,
    TB: tl.constexpr,
    KP: tl.constexpr,
    FEATURE: tl.constexpr,
    EVICT: tl.constexpr,
    RAGGED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Features of chunks c0 + first_tile .. + n_tiles - 1, TB chunks per program.

    The first half of the grid writes phi_k [B, n_tiles, H, C (+ KP evicted rows), F] of the chunk that each of these chunks
    promotes (two before it; tokens that stay in softmax as 0) and the sums mass [B, n_tiles, H, F]. The second half writes
    phi_q [B, n_tiles, H, C, F]. Grid (2 * ceil(n_tiles / TB), H, B).
    """
    NB: tl.constexpr = C // RB
    F: tl.constexpr = 2 * P if FEATURE <= 1 else P
    CR: tl.constexpr = C + KP if EVICT else C
    groups = (n_tiles + TB - 1) // TB
    i_group = tl.program_id(0) % groups
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    row, start, length, count = row_of(i_batch, p_new_tokens, p_past_length, p_query_start, p_state_row, T, RAGGED)
    end = length + count
    if count == 0:
        return
    i_kv = i_head // (H // HK)
    c0 = length // C
    o_row = tl.arange(0, RB)
    o_dim = tl.arange(0, DP)
    o_feature = tl.arange(0, PP)
    m_feature = o_feature < P
    w_head = (i_head % W_HEADS).to(tl.int64) * (P * D)
    first = i_group * TB
    last = tl.minimum(tl.minimum(first + TB, n_tiles), (end + C - 1) // C - c0 - first_tile)
    if tl.program_id(0) < groups:
        p_new = p_key + (start * HK + i_kv) * D
        p_ring = p_window_key + (row * HK + i_kv) * (2 * C) * D
        i_select = i_head // (H // HS)
        b_weight = load_weight(p_feature_k_weight + w_head, o_feature, P, D, DP)
        for tile in range(first, last):
            chunk = c0 + first_tile + tile
            if (chunk >= 2) & (chunk * C >= length):
                i_out = (i_batch.to(tl.int64) * n_tiles + tile) * H + i_head
                b_mass_plus = tl.zeros([PP], tl.float32)
                b_mass_minus = tl.zeros([PP], tl.float32)
                p_flag = p_flags + ((i_batch.to(tl.int64) * R + first_tile + tile) * HS + i_select) * C
                for r in tl.static_range(0, NB):
                    b_key = load_tokens(p_new, p_ring, (chunk - 2) * C + r * RB + o_row, length, end, HK * D, D, DP, C)
                    m_row = tl.load(p_flag + r * RB + o_row) != 0
                    b_plus, b_minus = _write_features(
                        b_key, b_weight, m_row, p_phi_k + (i_out * CR + r * RB) * F, P, PP, FEATURE, DOT
                    )
                    b_mass_plus += b_plus
                    b_mass_minus += b_minus
                if EVICT:  # rows that left the cache
                    o_rank = tl.arange(0, KP)
                    m_rank = o_rank < tl.load(p_evicted_count + i_batch.to(tl.int64) * HS + i_select)
                    p_old = p_evicted_key + ((i_batch.to(tl.int64) * HS + i_select) * KP + o_rank)[:, None] * D
                    b_old = tl.load(p_old + o_dim[None, :], mask=m_rank[:, None] & (o_dim < D)[None, :], other=0.0)
                    b_plus, b_minus = _write_features(
                        b_old, b_weight, m_rank, p_phi_k + (i_out * CR + C) * F, P, PP, FEATURE, DOT
                    )
                    b_mass_plus += b_plus
                    b_mass_minus += b_minus
                tl.store(p_mass + i_out * F + o_feature, b_mass_plus, mask=m_feature)
                if FEATURE <= 1:
                    tl.store(p_mass + i_out * F + P + o_feature, b_mass_minus, mask=m_feature)
    else:
        b_weight = load_weight(p_feature_q_weight + w_head, o_feature, P, D, DP)
        for tile in range(first, last):
            chunk = c0 + first_tile + tile
            if chunk >= 2:  # earlier chunks have no linear part
                i_out = (i_batch.to(tl.int64) * n_tiles + tile) * H + i_head
                for r in tl.static_range(0, NB):
                    o_query = chunk * C + r * RB + o_row
                    m_row = (o_query >= length) & (o_query < end)
                    p_q = p_query + ((start + o_query - length) * H + i_head)[:, None] * D + o_dim[None, :]
                    b_q = tl.load(p_q, mask=m_row[:, None] & (o_dim < D)[None, :], other=0.0)
                    _write_features(b_q, b_weight, m_row, p_phi_q + (i_out * C + r * RB) * F, P, PP, FEATURE, DOT)
