"""Third step of prefill: features of the keys that are folded into the linear state."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import ROWS, row_of, scales_at
from still_kernels.hybrid_attention.triton_common import kept_features, load_tokens, load_weight
from still_kernels.hybrid_attention.triton_pages import in_page


@triton.jit
def _project(b_x, b_weight, b_direction, b_square, DOT: tl.constexpr):
    """Add a block of columns to the projections [rows, PP] and to the squared norms [rows]."""
    b_direction = tl.dot(b_x, tl.trans(b_weight), b_direction, input_precision=DOT)
    b_wide = b_x.to(tl.float32)
    return b_direction, b_square + tl.sum(b_wide * b_wide, 1)


@triton.jit
def _write_features(b_direction, b_square, m_row, p_out, P: tl.constexpr, PP: tl.constexpr, FEATURE: tl.constexpr):
    """Features of a block of rows to `p_out` [rows, F], 0 for rows outside m_row."""
    F: tl.constexpr = 2 * P if FEATURE <= 1 else P
    o_feature = tl.arange(0, PP)
    m_feature = o_feature < P
    o_row = tl.arange(0, b_direction.shape[0])
    b_plus, b_minus = kept_features(b_direction, b_square, m_row.to(tl.float32), P, PP, FEATURE)
    p_block = p_out + o_row[:, None] * F + o_feature[None, :]
    tl.store(p_block, b_plus.to(p_out.dtype.element_ty), mask=m_feature[None, :])
    if FEATURE <= 1:
        tl.store(p_block + P, b_minus.to(p_out.dtype.element_ty), mask=m_feature[None, :])


@triton.jit(
    do_not_specialize=["T", "H", "HK", "HS", "W_HEADS", "R", "first_tile", "n_tiles"],
    do_not_specialize_on_alignment=ROWS,
)
def features_kernel(
    p_key, p_feature_k_weight, p_window_key, p_window_key_scale, p_new_tokens, p_past_length, p_query_start, p_state_row,
    p_flags, p_evicted_key, p_evicted_count, p_phi_k,
    T, H, HK, HS, W_HEADS, R, first_tile, n_tiles,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DK: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, RB: tl.constexpr,
    TB: tl.constexpr, KP: tl.constexpr, FEATURE: tl.constexpr, EVICT: tl.constexpr, RAGGED: tl.constexpr, PAGES: tl.constexpr,
    CODES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Features of what chunks c0 + first_tile .. + n_tiles - 1 promote, TB chunks per program.

    Writes phi_k [B, n_tiles, H, C (+ KP evicted rows), F] of the chunk that each of these chunks promotes (two before it; tokens
    that stay in softmax as 0). Grid (ceil(n_tiles / TB), H, B).
    """
    NB: tl.constexpr = C // RB
    F: tl.constexpr = 2 * P if FEATURE <= 1 else P
    CR: tl.constexpr = C + KP if EVICT else C
    i_group = tl.program_id(0)
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    row, start, length, count = row_of(
        i_batch, p_new_tokens, p_past_length, p_query_start, p_state_row, T, RAGGED, PAGES != 0
    )
    p_window_key = in_page(p_window_key, p_state_row, i_batch, 0, PAGES)
    if CODES:
        p_window_key_scale = in_page(p_window_key_scale, p_state_row, i_batch, 0, PAGES)
    end = length + count
    if count == 0:
        return
    i_kv = i_head // (H // HK)
    c0 = length // C
    o_row = tl.arange(0, RB)
    o_dim = tl.arange(0, DK)
    o_feature = tl.arange(0, PP)
    w_head = (i_head % W_HEADS).to(tl.int64) * (P * D)
    first = i_group * TB
    last = tl.minimum(tl.minimum(first + TB, n_tiles), (end + C - 1) // C - c0 - first_tile)
    p_new = p_key + (start * HK + i_kv) * D
    p_ring = p_window_key + (row * HK + i_kv) * (2 * C) * D
    p_ring_scale = scales_at(p_window_key_scale, (row * HK + i_kv) * (2 * C), CODES)
    i_select = i_head // (H // HS)
    p_weight = p_feature_k_weight + w_head
    b_weight = load_weight(p_weight, o_feature, o_dim, P, D)
    for tile in range(first, last):
        chunk = c0 + first_tile + tile
        if (chunk >= 2) & (chunk * C >= length):
            i_out = (i_batch.to(tl.int64) * n_tiles + tile) * H + i_head
            p_flag = p_flags + ((i_batch.to(tl.int64) * R + first_tile + tile) * HS + i_select) * C
            for r in range(0, NB):
                o_position = (chunk - 2) * C + r * RB + o_row
                b_direction = tl.zeros([RB, PP], tl.float32)
                b_square = tl.zeros([RB], tl.float32)
                for d in range(0, DP, DK):
                    b_key = load_tokens(
                        p_new, p_ring, p_ring_scale, o_position, length, end, HK * D, d + o_dim, D, C, CODES
                    )
                    if DK < DP:
                        b_weight = load_weight(p_weight, o_feature, d + o_dim, P, D)
                    b_direction, b_square = _project(b_key, b_weight, b_direction, b_square, DOT)
                m_row = tl.load(p_flag + r * RB + o_row) != 0
                _write_features(b_direction, b_square, m_row, p_phi_k + (i_out * CR + r * RB) * F, P, PP, FEATURE)
            if EVICT:  # rows that left the cache
                o_rank = tl.arange(0, KP)
                m_rank = o_rank < tl.load(p_evicted_count + i_batch.to(tl.int64) * HS + i_select)
                p_old = p_evicted_key + ((i_batch.to(tl.int64) * HS + i_select) * KP + o_rank)[:, None] * D
                b_direction = tl.zeros([KP, PP], tl.float32)
                b_square = tl.zeros([KP], tl.float32)
                for d in range(0, DP, DK):
                    mask = m_rank[:, None] & (d + o_dim < D)[None, :]
                    b_old = tl.load(p_old + d + o_dim[None, :], mask=mask, other=0.0)
                    if DK < DP:
                        b_weight = load_weight(p_weight, o_feature, d + o_dim, P, D)
                    b_direction, b_square = _project(b_old, b_weight, b_direction, b_square, DOT)
                _write_features(b_direction, b_square, m_rank, p_phi_k + (i_out * CR + C) * F, P, PP, FEATURE)
