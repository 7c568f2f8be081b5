"""Third step of prefill: the linear state before each chunk, by one pass over the chunks with S in registers."""

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
def _fold(
    b_plus_t,
    b_minus_t,
    b_z_plus,
    b_z_minus,
    b_key,
    b_value,
    b_weight,
    b_scale,
    b_lse_plus,
    b_lse_minus,
    m_token,
    m_feature,
    FEATURE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Add tokens to the transposed slices of S [DP, PB] and to z [PB]; m_token [rows] says which."""
    b_direction = tl.dot(b_key, tl.trans(b_weight), input_precision=DOT)
    b_phi = feature_plus(b_direction, b_scale, b_lse_plus, m_feature, FEATURE)
    b_phi = tl.where(m_token[:, None], b_phi, 0.0)
    b_z_plus += tl.sum(b_phi, 0)
    b_value_t = tl.trans(b_value)
    b_plus_t = tl.dot(b_value_t, b_phi.to(b_value.dtype), b_plus_t, input_precision=DOT)
    if FEATURE <= 1:
        b_psi = feature_minus(b_direction, b_scale, b_lse_minus, m_feature)
        b_psi = tl.where(m_token[:, None], b_psi, 0.0)
        b_z_minus += tl.sum(b_psi, 0)
        b_minus_t = tl.dot(b_value_t, b_psi.to(b_value.dtype), b_minus_t, input_precision=DOT)
    return b_plus_t, b_minus_t, b_z_plus, b_z_minus


@triton.jit
def _row_stats(b_key, p_weight, P: tl.constexpr, PP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
               FEATURE: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Feature statistics from the whole projection."""
    o_feature = tl.arange(0, PP)
    b_weight = load_weight(p_weight, o_feature, P, D, DP)
    b_direction = tl.dot(b_key, tl.trans(b_weight), input_precision=DOT)
    b_wide = b_key.to(tl.float32)
    return feature_stats(b_direction, tl.sum(b_wide * b_wide, 1), o_feature < P, FEATURE)


@triton.jit(do_not_specialize=["T", "H", "HK", "HS", "W_HEADS", "R", "first_tile", "n_tiles", "store_prefix"])
def scan_kernel(
    p_key,
    p_value,
    p_feature_k_weight,
    p_window_key,
    p_window_value,
    p_kv_state,
    p_z_state,
    p_new_tokens,
    p_past_length,
    p_query_start,
    p_state_row,
    p_stats,
    p_flags,
    p_evicted_key,
    p_evicted_value,
    p_evicted_count,
    p_prefix_kv,
    p_prefix_z,
    T,
    H,
    HK,
    HS,
    W_HEADS,
    R,
    first_tile,
    n_tiles,
    store_prefix,
    C: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,
    PB: tl.constexpr,
    RB: tl.constexpr,
    KP: tl.constexpr,
    FEATURE: tl.constexpr,
    EVICT: tl.constexpr,
    RAGGED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Fold promoted chunks into S and z in chunk order; leave what each chunk c0 + first_tile + i sees.

    Each program owns PB projection rows (2 PB features of the _pm maps) of one head's S, so in place is hazard-free.
    prefix_kv [B, n_tiles, H, F, D], prefix_z [B, n_tiles, H, F]. Grid (PP / PB, H, B). With EVICT (folding policies, one
    chunk per call) the statistics are computed here and the evicted rows are folded as well.
    """
    NB: tl.constexpr = C // RB
    F: tl.constexpr = 2 * P if FEATURE <= 1 else P
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    row, start, length, count = row_of(i_batch, p_new_tokens, p_past_length, p_query_start, p_state_row, T, RAGGED)
    end = length + count
    c0 = length // C
    number = tl.minimum(n_tiles, (end + C - 1) // C - c0 - first_tile)
    if count == 0 or number <= 0:
        return
    if EVICT:
        begins = (c0 + first_tile) * C
        if store_prefix == 0 and (begins < length or begins >= end or c0 + first_tile < 2):
            return
    i_kv = i_head // (H // HK)
    i_select = i_head // (H // HS)
    o_feature = tl.program_id(0) * PB + tl.arange(0, PB)
    m_feature = o_feature < P
    o_dim = tl.arange(0, DP)
    m_slice = (o_dim < D)[:, None] & m_feature[None, :]
    p_state = p_kv_state + (row * H + i_head) * (F * D) + o_feature[None, :] * D + o_dim[:, None]
    p_mass = p_z_state + (row * H + i_head) * F + o_feature
    b_plus_t = tl.load(p_state, mask=m_slice, other=0.0)
    b_z_plus = tl.load(p_mass, mask=m_feature, other=0.0)
    b_minus_t = tl.zeros([DP, PB], tl.float32)
    b_z_minus = tl.zeros([PB], tl.float32)
    if FEATURE <= 1:
        b_minus_t = tl.load(p_state + P * D, mask=m_slice, other=0.0)
        b_z_minus = tl.load(p_mass + P, mask=m_feature, other=0.0)
    p_head = p_feature_k_weight + (i_head % W_HEADS).to(tl.int64) * (P * D)
    b_weight = load_weight(p_head, o_feature, P, D, DP)
    p_key_new = p_key + (start * HK + i_kv) * D
    p_key_ring = p_window_key + (row * HK + i_kv) * (2 * C) * D
    p_value_new = p_value + (start * HK + i_kv) * D
    p_value_ring = p_window_value + (row * HK + i_kv) * (2 * C) * D
    o_row = tl.arange(0, RB)
    i_row = i_batch.to(tl.int64)
    for j in range(number * NB):
        i_tile = first_tile + j // NB
        chunk = c0 + i_tile
        promoted = (chunk >= 2) & (chunk * C >= length)
        o_inner = (j % NB) * RB + o_row
        o_position = (chunk - 2) * C + o_inner
        o_position = tl.where(promoted, o_position, -1)
        b_key = load_tokens(p_key_new, p_key_ring, o_position, length, end, HK * D, D, DP, C)
        b_value = load_tokens(p_value_new, p_value_ring, o_position, length, end, HK * D, D, DP, C)
        p_flag = p_flags + ((i_row * R + i_tile) * HS + i_select) * C + o_inner
        m_token = tl.load(p_flag, mask=(o_inner < C) & promoted, other=0) != 0
        if EVICT:
            b_scale, b_lse_plus, b_lse_minus = _row_stats(b_key, p_head, P, PP, D, DP, FEATURE, DOT)
        else:
            p_stat = p_stats + (((i_row * R + i_tile) * H + i_head) * 3) * C + o_inner
            m_stat = (o_inner < C) & promoted
            b_scale = tl.load(p_stat, mask=m_stat, other=0.0)
            b_lse_plus = tl.load(p_stat + C, mask=m_stat, other=0.0)
            b_lse_minus = tl.load(p_stat + 2 * C, mask=m_stat, other=0.0)
        b_plus_t, b_minus_t, b_z_plus, b_z_minus = _fold(
            b_plus_t, b_minus_t, b_z_plus, b_z_minus, b_key, b_value, b_weight, b_scale, b_lse_plus, b_lse_minus,
            m_token, m_feature, FEATURE, DOT,
        )  # fmt: skip
        if EVICT:
            if j % NB == NB - 1:  # the rows that left the cache
                o_rank = tl.arange(0, KP)
                m_rank = o_rank < tl.load(p_evicted_count + i_row * HS + i_select)
                p_row = ((i_row * HS + i_select) * KP + o_rank)[:, None] * D + o_dim[None, :]
                m_row = m_rank[:, None] & (o_dim < D)[None, :]
                b_old_key = tl.load(p_evicted_key + p_row, mask=m_row, other=0.0)
                b_old_value = tl.load(p_evicted_value + p_row, mask=m_row, other=0.0)
                b_scale, b_lse_plus, b_lse_minus = _row_stats(b_old_key, p_head, P, PP, D, DP, FEATURE, DOT)
                b_plus_t, b_minus_t, b_z_plus, b_z_minus = _fold(
                    b_plus_t, b_minus_t, b_z_plus, b_z_minus, b_old_key, b_old_value, b_weight, b_scale, b_lse_plus,
                    b_lse_minus, m_rank, m_feature, FEATURE, DOT,
                )  # fmt: skip
        m_store = m_slice & (j % NB == NB - 1) & (store_prefix != 0)
        i_out = (i_row * n_tiles + j // NB) * H + i_head
        p_out = p_prefix_kv + i_out * (F * D) + o_feature[None, :] * D + o_dim[:, None]
        p_out_z = p_prefix_z + i_out * F + o_feature
        m_store_z = m_feature & (j % NB == NB - 1) & (store_prefix != 0)
        tl.store(p_out, b_plus_t.to(p_prefix_kv.dtype.element_ty), mask=m_store)
        tl.store(p_out_z, b_z_plus, mask=m_store_z)
        if FEATURE <= 1:
            tl.store(p_out + P * D, b_minus_t.to(p_prefix_kv.dtype.element_ty), mask=m_store)
            tl.store(p_out_z + P, b_z_minus, mask=m_store_z)
    tl.store(p_state, b_plus_t, mask=m_slice)
    tl.store(p_mass, b_z_plus, mask=m_feature)
    if FEATURE <= 1:
        tl.store(p_state + P * D, b_minus_t, mask=m_slice)
        tl.store(p_mass + P, b_z_minus, mask=m_feature)
