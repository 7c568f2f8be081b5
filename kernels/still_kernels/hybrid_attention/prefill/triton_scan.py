"""Third step of prefill, second half: the linear state along the chunks, in one pass with S in registers."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import ROWS, row_of, scales_at
from still_kernels.hybrid_attention.triton_common import load_tokens
from still_kernels.hybrid_attention.triton_narrow import load_sums, rest_of, store_sums
from still_kernels.hybrid_attention.triton_pages import head_in_page, in_page


@triton.jit(
    do_not_specialize=["T", "H", "HK", "HS", "first_tile", "n_tiles", "store_prefix"],
    do_not_specialize_on_alignment=ROWS,
)
def scan_kernel(
    p_value, p_window_value, p_window_value_scale, p_kv_state, p_z_state, p_new_tokens, p_past_length, p_query_start,
    p_state_row, p_phi_k, p_evicted_value, p_prefix_kv, p_prefix_z,
    T, H, HK, HS, first_tile, n_tiles, store_prefix,
    C: tl.constexpr, D: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, DB: tl.constexpr, RB: tl.constexpr, KP: tl.constexpr,
    EVERY: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr, RAGGED: tl.constexpr, PAGES: tl.constexpr,
    CODES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Fold promoted chunks into S and z in chunk order; leave what each chunk c0 + first_tile + EVERY * i sees.

    z is summed from the features that enter S, which are rounded to the operands' type: both keep one ratio.
    Each program owns an FB x DB block of one head's S, so in place is hazard-free. prefix_kv [B, ceil(n_tiles / EVERY), H, F, D],
    prefix_z [B, ceil(n_tiles / EVERY), H, F]. Grid (ceil(F / FB) * ceil(D / DB), H, B). EVICT (folding policies): one chunk per
    call, and the rows that left the cache are folded as well.
    """
    NB: tl.constexpr = C // RB
    CR: tl.constexpr = C + KP if EVICT else C
    COLUMNS: tl.constexpr = (D + DB - 1) // DB
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    row, start, length, count = row_of(
        i_batch, p_new_tokens, p_past_length, p_query_start, p_state_row, T, RAGGED, PAGES != 0
    )
    p_window_value = in_page(p_window_value, p_state_row, i_batch, 0, PAGES)
    if CODES:
        p_window_value_scale = in_page(p_window_value_scale, p_state_row, i_batch, 0, PAGES)
    p_kv_state, i_own = head_in_page(p_kv_state, p_state_row, i_batch, i_head, PAGES)
    p_z_state = in_page(p_z_state, p_state_row, i_batch, 0, PAGES)
    end = length + count
    c0 = length // C + first_tile
    number = tl.minimum(n_tiles, (end + C - 1) // C - c0)
    if count == 0 or number <= 0:
        return
    if EVICT:
        if store_prefix == 0 and (c0 * C < length or c0 * C >= end or c0 < 2):
            return
    i_kv = i_head // (H // HK)
    o_feature = (tl.program_id(0) // COLUMNS) * FB + tl.arange(0, FB)
    o_dim = (tl.program_id(0) % COLUMNS) * DB + tl.arange(0, DB)
    m_feature = o_feature < F
    m_block = m_feature[:, None] & (o_dim < D)[None, :]
    o_block = o_feature[:, None] * D + o_dim[None, :]
    o_row = tl.arange(0, RB)
    p_state = p_kv_state + (row * H + i_own) * (F * D) + o_block
    p_rest = rest_of(p_kv_state, PAGES) + (row * H + i_own) * (F * D) + o_block
    # A page that is new holds an old row's S and z; nothing is promoted within two chunks.
    m_state = m_block
    m_z = m_feature[:, None]
    if PAGES != 0:
        held = (length > 2 * C) | (first_tile > 0)
        m_state = m_state & held
        m_z = m_z & held
    b_state = load_sums(p_state, p_rest, m_state)
    # z by products with ones, in columns that are all equal; the programs of the first columns of S store one of them.
    o_copy = tl.arange(0, 16)
    m_mass = m_feature[:, None] & (o_copy == 0)[None, :] & (tl.program_id(0) % COLUMNS == 0)
    p_z = p_z_state + (row * H + i_head) * F + o_feature[:, None] + 0 * o_copy[None, :]
    b_mass = tl.load(p_z, mask=m_z, other=0.0)
    b_ones = tl.full([RB, 16], 1.0, p_phi_k.dtype.element_ty)
    p_new = p_value + (start * HK + i_kv) * D
    p_ring = p_window_value + (row * HK + i_kv) * (2 * C) * D
    p_ring_scale = scales_at(p_window_value_scale, (row * HK + i_kv) * (2 * C), CODES)
    i_first = i_batch.to(tl.int64) * n_tiles * H + i_head
    i_stored = i_batch.to(tl.int64) * ((n_tiles + EVERY - 1) // EVERY) * H + i_head
    for j in tl.range(0, number * NB, num_stages=STAGES):
        chunk = c0 + j // NB
        promoted = (chunk >= 2) & (chunk * C >= length)
        o_inner = (j % NB) * RB + o_row
        i_out = i_first + (j // NB) * H
        p_phi = p_phi_k + (i_out * CR + o_inner)[:, None] * F + o_feature[None, :]
        b_phi = tl.load(p_phi, mask=(promoted & (o_inner < C))[:, None] & m_feature[None, :], other=0.0)
        o_position = tl.where(promoted, (chunk - 2) * C + o_inner, -1)
        b_value = load_tokens(p_new, p_ring, p_ring_scale, o_position, length, end, HK * D, o_dim, D, C, CODES)
        b_state = tl.dot(tl.trans(b_phi), b_value.to(b_phi.dtype), b_state, input_precision=DOT)
        b_mass += tl.dot(tl.trans(b_phi), b_ones, input_precision=DOT)
        if not EVICT:
            stored = j % (NB * EVERY) == NB - 1
            i_prefix = i_stored + j // (NB * EVERY) * H
            p_out = p_prefix_kv + i_prefix * (F * D) + o_block
            tl.store(p_out, b_state.to(p_prefix_kv.dtype.element_ty), mask=m_block & stored)
            p_out = p_prefix_z + i_prefix * F + o_feature[:, None] + 0 * o_copy[None, :]
            tl.store(p_out, b_mass, mask=m_mass & stored)
    if EVICT:
        promoted = (c0 >= 2) & (c0 * C >= length)
        o_rank = tl.arange(0, KP)
        p_phi = p_phi_k + (i_first * CR + C + o_rank)[:, None] * F + o_feature[None, :]
        b_phi = tl.load(p_phi, mask=m_feature[None, :] & promoted, other=0.0)
        i_select = i_batch.to(tl.int64) * HS + i_head // (H // HS)
        p_old = p_evicted_value + (i_select * KP + o_rank)[:, None] * D + o_dim[None, :]
        b_value = tl.load(p_old, mask=(o_dim < D)[None, :] & promoted, other=0.0)
        b_state = tl.dot(tl.trans(b_phi), b_value.to(b_phi.dtype), b_state, input_precision=DOT)
        b_few = tl.full([KP, 16], 1.0, p_phi_k.dtype.element_ty)
        b_mass += tl.dot(tl.trans(b_phi), b_few, input_precision=DOT)
        p_out = p_prefix_kv + i_stored * (F * D) + o_block
        tl.store(p_out, b_state.to(p_prefix_kv.dtype.element_ty), mask=m_block & (store_prefix != 0))
        p_out = p_prefix_z + i_stored * F + o_feature[:, None] + 0 * o_copy[None, :]
        tl.store(p_out, b_mass, mask=m_mass & (store_prefix != 0))
    store_sums(p_state, p_rest, b_state, m_block)
    tl.store(p_z, b_mass, mask=m_mass)
