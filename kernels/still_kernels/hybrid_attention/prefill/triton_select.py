"""Second step of prefill: the tokens of a promoted chunk that stay in softmax, and the cached ones that they replace."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import ROWS, as_numbers, row_of, scales_at, store_rows
from still_kernels.hybrid_attention.triton_common import load_tokens, select_chunk, selected_offsets
from still_kernels.hybrid_attention.triton_pages import in_page, rows_of


@triton.jit
def _copy_row(
    tokens, cache, at, heads, position, slot, o_dim, C: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr, PAGES: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """A token's key or value into the cache; nowhere beyond the capacity: the output is NaN, memory stays intact.

    tokens, cache: Pointers to the call's, the ring and its scales, to the cache and its scales. at, heads: As the kernel has them.
    """
    p_new, p_ring, p_ring_scale = tokens
    p_cache, p_cache_scale = cache
    p_state_row, i_batch, start, row, length = at
    i_select, i_kv, HK, HS, N = heads
    if CODES:
        to = rows_of(
            p_cache, p_state_row, i_batch, (row * HS + i_select) * N, i_select, 0, slot, slot < N, VALUE, D, PAGES
        )
        scale = rows_of(
            p_cache_scale, p_state_row, i_batch, (row * HS + i_select) * N, i_select, 0, slot, slot < N, VALUE, 1, PAGES
        )
        o_one = tl.arange(0, 1)
        ring = (row * HK + i_kv) * (2 * C)
        b_rows = load_tokens(
            p_new + (start * HK + i_kv) * D, p_ring + ring * D, p_ring_scale + ring, position + o_one, length, position + 1, HK * D,
            o_dim, D, C, CODES,
        )  # fmt: skip
        store_rows(p_cache, p_cache_scale, to + o_one, b_rows, slot + o_one < N, o_dim, D, CODES, scale + o_one)
    else:
        p_from = p_ring + ((row * HK + i_kv) * (2 * C) + (position & (2 * C - 1))) * D
        if position >= length:
            p_from = p_new + ((start + position - length) * HK + i_kv) * D
        b_row = tl.load(p_from + o_dim, mask=o_dim < D, other=0.0)
        to = rows_of(
            p_cache, p_state_row, i_batch, (row * HS + i_select) * N, i_select, 0, slot, slot < N, VALUE, D, PAGES
        )
        tl.store(p_cache + to * D + o_dim, b_row, mask=(o_dim < D) & (slot < N))


@triton.jit(do_not_specialize=["T", "H", "HK", "K", "N", "R", "first_tile"], do_not_specialize_on_alignment=ROWS)
def select_kernel(
    p_key, p_value, p_window_key, p_window_value, p_window_score, p_salient_key, p_salient_value,
    p_window_key_scale, p_window_value_scale, p_salient_key_scale, p_salient_value_scale, p_new_tokens, p_past_length,
    p_query_start, p_state_row, p_score, p_flags, p_evicted_key, p_evicted_value, p_evicted_count,
    T, H, HK, K, N, R, first_tile,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr, GP: tl.constexpr, SCOPE: tl.constexpr,
    EVICT: tl.constexpr, RAGGED: tl.constexpr, PAGES: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Selection of chunk c-2 for every chunk c that begins within the call.

    Writes flags [B, R, HS, C] (1: fold the token into S and z) and the salient cache; with a folding policy also the rows
    that leave the cache, evicted_key and evicted_value [B, HS, KP, D], and their number [B, HS]; such a call handles one chunk,
    because the cache is then the state at that chunk. Grid (chunks, HS, B).
    """
    i_tile = first_tile + tl.program_id(0)
    i_select = tl.program_id(1)
    HS = tl.num_programs(1)
    i_batch = tl.program_id(2)
    row, start, length, count = row_of(
        i_batch, p_new_tokens, p_past_length, p_query_start, p_state_row, T, RAGGED, PAGES != 0
    )
    p_window_key = in_page(p_window_key, p_state_row, i_batch, 0, PAGES)
    p_window_value = in_page(p_window_value, p_state_row, i_batch, 0, PAGES)
    if CODES:
        p_window_key_scale = in_page(p_window_key_scale, p_state_row, i_batch, 0, PAGES)
        p_window_value_scale = in_page(p_window_value_scale, p_state_row, i_batch, 0, PAGES)
    p_window_score = in_page(p_window_score, p_state_row, i_batch, 0, PAGES)
    end = length + count
    chunk = length // C + i_tile  # the chunk that begins
    old = chunk - 2  # the chunk that is promoted
    i_group = i_batch.to(tl.int64) * HS + i_select
    if EVICT:
        tl.store(p_evicted_count + i_group, 0)
    if count == 0 or chunk * C < length or chunk * C >= end or old < 0:
        return
    GR = H // HS
    i_kv = (i_select * GR) // (H // HK)
    b_selected = select_chunk(p_score, p_window_score, old, length, end, start, row, i_select, H, GR, K, SCOPE, GP, C)
    o_row = tl.arange(0, C)
    o_dim = tl.arange(0, DP)
    p_flag = p_flags + ((i_batch.to(tl.int64) * R + i_tile) * HS + i_select) * C
    if not EVICT:
        token = -1
        at = (p_state_row, i_batch, start, row, length)
        heads = (i_select, i_kv, HK, HS, N)
        for rank in range(K):
            token = tl.min(tl.where(b_selected & (o_row > token), o_row, C), 0)
            keys = (p_key, p_window_key, p_window_key_scale)
            _copy_row(
                keys, (p_salient_key, p_salient_key_scale), at, heads, old * C + token, old * K + rank, o_dim, C, D, 0, PAGES, CODES
            )  # fmt: skip
            values = (p_value, p_window_value, p_window_value_scale)
            _copy_row(
                values, (p_salient_value, p_salient_value_scale), at, heads, old * C + token, old * K + rank, o_dim, C, D, 1, PAGES, CODES
            )  # fmt: skip
        tl.store(p_flag + o_row, tl.where(b_selected, 0, 1).to(tl.int8))
    else:
        b_offset = selected_offsets(b_selected, KP, C)
        o_rank = tl.arange(0, KP)
        m_rank = o_rank < K
        b_slot = old * K + o_rank
        b_kept = m_rank  # newcomers that enter the cache
        base = (row * HS + i_select) * N
        m_evicted = (o_rank < 0) & m_rank

        if N == 0:
            b_kept = b_kept & (o_rank < 0)
        else:
            m_evicted = m_rank & (old * K >= N)
            b_slot = b_slot % N

        tl.store(p_evicted_count + i_group, tl.sum(m_evicted.to(tl.int32), 0))
        m_dim = (o_dim < D)[None, :]
        b_key = rows_of(p_salient_key, p_state_row, i_batch, base, i_select, 0, b_slot, m_evicted, 0, D, PAGES)
        b_value = rows_of(p_salient_value, p_state_row, i_batch, base, i_select, 0, b_slot, m_evicted, 1, D, PAGES)
        o_key = b_key[:, None] * D + o_dim[None, :]
        o_value = b_value[:, None] * D + o_dim[None, :]
        m_old = m_evicted[:, None] & (o_dim < D)[None, :]
        p_to = (i_group * KP + o_rank)[:, None] * D + o_dim[None, :]
        p_out = p_evicted_key + p_to
        b_old = tl.load(p_salient_key + o_key, mask=m_old, other=0.0)
        if CODES:
            b_scale = rows_of(
                p_salient_key_scale, p_state_row, i_batch, base, i_select, 0, b_slot, m_evicted, 0, 1, PAGES
            )
            b_old = as_numbers(b_old, p_salient_key_scale, b_scale, m_evicted, p_key.dtype.element_ty, CODES)
        tl.store(p_out, b_old, mask=m_dim)
        p_out = p_evicted_value + p_to
        b_old = tl.load(p_salient_value + o_value, mask=m_old, other=0.0)
        if CODES:
            b_scale = rows_of(
                p_salient_value_scale, p_state_row, i_batch, base, i_select, 0, b_slot, m_evicted, 1, 1, PAGES
            )
            b_old = as_numbers(b_old, p_salient_value_scale, b_scale, m_evicted, p_key.dtype.element_ty, CODES)
        tl.store(p_out, b_old, mask=m_dim)
        tl.debug_barrier()  # every row has left before its slot is written again
        b_key = rows_of(p_salient_key, p_state_row, i_batch, base, i_select, 0, b_slot, b_kept, 0, D, PAGES)
        p_to = p_salient_key + b_key[:, None] * D + o_dim[None, :]
        m_to = b_kept[:, None] & (o_dim < D)[None, :]
        o_token = old * C + b_offset
        p_new = p_key + (start * HK + i_kv) * D
        p_ring = p_window_key + (row * HK + i_kv) * (2 * C) * D
        p_scale = scales_at(p_window_key_scale, (row * HK + i_kv) * (2 * C), CODES)
        b_new = load_tokens(p_new, p_ring, p_scale, o_token, length, end, HK * D, o_dim, D, C, CODES)
        if CODES:
            b_scale = rows_of(p_salient_key_scale, p_state_row, i_batch, base, i_select, 0, b_slot, b_kept, 0, 1, PAGES)
            store_rows(p_salient_key, p_salient_key_scale, b_key, b_new, b_kept, o_dim, D, CODES, b_scale)
        else:
            tl.store(p_to, b_new, mask=m_to)
        b_value = rows_of(p_salient_value, p_state_row, i_batch, base, i_select, 0, b_slot, b_kept, 1, D, PAGES)
        p_to = p_salient_value + b_value[:, None] * D + o_dim[None, :]
        p_new = p_value + (start * HK + i_kv) * D
        p_ring = p_window_value + (row * HK + i_kv) * (2 * C) * D
        p_scale = scales_at(p_window_value_scale, (row * HK + i_kv) * (2 * C), CODES)
        b_new = load_tokens(p_new, p_ring, p_scale, o_token, length, end, HK * D, o_dim, D, C, CODES)
        if CODES:
            b_scale = rows_of(
                p_salient_value_scale, p_state_row, i_batch, base, i_select, 0, b_slot, b_kept, 1, 1, PAGES
            )
            store_rows(p_salient_value, p_salient_value_scale, b_value, b_new, b_kept, o_dim, D, CODES, b_scale)
        else:
            tl.store(p_to, b_new, mask=m_to)

        b_stays = tl.sum(((o_row[None, :] == b_offset[:, None]) & b_kept[:, None]).to(tl.int32), 0) > 0
        tl.store(p_flag + o_row, tl.where(b_stays, 0, 1).to(tl.int8))
