"""Last steps of prefill: local, salient and linear attention in one epilogue, then the window ring."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import LOG2E, ROWS, absorb, as_numbers, row_of, scales_at, store_rows
from still_kernels.hybrid_attention.triton_common import load_tokens
from still_kernels.hybrid_attention.triton_pages import cache_of, in_page, scale_slots_of, scales_of, slots_of


@triton.jit
def _hide_far_keys(b_dot, o_key, o_query, o_start, C: tl.constexpr, BM: tl.constexpr):
    """-inf for keys after the query or more than one chunk before its own, which starts at o_start."""
    m_seen = o_key[None, :] <= o_query[:, None]
    if BM > C:
        m_seen = m_seen & (o_key[None, :] >= o_start[:, None] - C)
    return tl.where(m_seen, b_dot, float("-inf"))


@triton.jit(
    do_not_specialize=["T", "H", "HK", "HS", "K", "N", "first_tile", "n_tiles", "phantom"],
    do_not_specialize_on_alignment=ROWS,
)
def attend_kernel(
    p_query, p_key, p_value, p_gate, p_window_factor, p_window_key, p_window_value, p_salient_key, p_salient_value,
    p_window_key_scale, p_window_value_scale, p_salient_key_scale, p_salient_value_scale, p_new_tokens, p_past_length,
    p_query_start, p_state_row, p_linear, p_linear_sum, p_output,
    T, H, HK, HS, K, N, first_tile, n_tiles, phantom, scale, epsilon,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    SETTLE: tl.constexpr, GATE: tl.constexpr, FACTOR: tl.constexpr, EVICT: tl.constexpr, RAGGED: tl.constexpr,
    PAGES: tl.constexpr, CODES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Output of the queries of chunks c0 + first_tile .. + n_tiles - 1. Grid (ceil(n_tiles * C / BM), H, B).

    A block of BM queries lies within one chunk or spans whole ones. The longest programs start first.
    """
    i_block = tl.num_programs(0) - 1 - tl.program_id(0)
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    row, start, length, count = row_of(
        i_batch, p_new_tokens, p_past_length, p_query_start, p_state_row, T, RAGGED, PAGES != 0
    )
    p_window_key = in_page(p_window_key, p_state_row, i_batch, 0, PAGES)
    p_window_value = in_page(p_window_value, p_state_row, i_batch, 0, PAGES)
    if CODES:
        p_window_key_scale = in_page(p_window_key_scale, p_state_row, i_batch, 0, PAGES)
        p_window_value_scale = in_page(p_window_value_scale, p_state_row, i_batch, 0, PAGES)
    end = length + count
    span = count if RAGGED else T
    c0 = length // C + first_tile
    first = c0 * C + i_block * BM
    limit = tl.minimum(length + span, (c0 + n_tiles) * C)
    if first >= limit:
        return
    o_dim = tl.arange(0, DP)
    m_dim = o_dim < D
    o_query = first + tl.arange(0, BM)
    o_token = start + o_query - length
    p_tile = (o_token * H + i_head)[:, None] * D + o_dim[None, :]
    m_store = (o_query >= length) & (o_query < limit)
    if first >= end:  # padding
        tl.store(
            p_output + p_tile, tl.zeros([BM, DP], p_output.dtype.element_ty), mask=m_store[:, None] & m_dim[None, :]
        )
        return
    m_query = m_store & (o_query < end)
    b_q = tl.load(p_query + p_tile, mask=m_query[:, None] & m_dim[None, :], other=0.0)
    scale2 = scale * LOG2E
    chunk = first // C
    last_chunk = (tl.minimum(first + BM, limit) - 1) // C
    o_start = o_query // C * C  # of the query's chunk
    i_kv = i_head // (H // HK)

    # Local softmax: the previous chunk and the current one up to the query. Blocks that reach into the ring come first.
    p_key_new = p_key + (start * HK + i_kv) * D
    p_key_ring = p_window_key + (row * HK + i_kv) * (2 * C) * D
    p_value_new = p_value + (start * HK + i_kv) * D
    p_value_ring = p_window_value + (row * HK + i_kv) * (2 * C) * D
    p_key_scale = scales_at(p_window_key_scale, (row * HK + i_kv) * (2 * C), CODES)
    p_value_scale = scales_at(p_window_value_scale, (row * HK + i_kv) * (2 * C), CODES)
    b_max = tl.full([BM], -1.0e30, tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, DP], tl.float32)
    o_slot = tl.arange(0, BN)
    o_tile = o_slot[:, None] * D + o_dim[None, :]
    begin = tl.maximum(chunk - 1, 0) * C
    stop = tl.minimum(first + BM, end)
    fresh = begin + (tl.maximum(length - begin, 0) + BN - 1) // BN * BN
    for o_first in tl.range(begin, tl.minimum(fresh, stop), BN, num_stages=1):
        o_key = o_first + o_slot
        b_key = load_tokens(p_key_new, p_key_ring, p_key_scale, o_key, length, end, HK * D, o_dim, D, C, CODES)
        b_value = load_tokens(p_value_new, p_value_ring, p_value_scale, o_key, length, end, HK * D, o_dim, D, C, CODES)
        b_dot = tl.dot(b_q, tl.trans(b_key), input_precision=DOT)
        b_dot = _hide_far_keys(b_dot, o_key, o_query, o_start, C, BM)
        b_acc, b_max, b_sum = absorb(b_acc, b_max, b_sum, b_dot, b_value, scale2, SETTLE, DOT)
    for o_first in tl.range(fresh, stop, BN, num_stages=STAGES):
        o_key = o_first + o_slot
        p_first = (o_first - length).to(tl.int64) * (HK * D)
        o_new = o_slot[:, None] * (HK * D) + o_dim[None, :]
        m_key = (o_key < end)[:, None] & m_dim[None, :]
        b_key = tl.load(p_key_new + p_first + o_new, mask=m_key, other=0.0)
        b_dot = tl.dot(b_q, tl.trans(b_key), input_precision=DOT)
        b_dot = _hide_far_keys(b_dot, o_key, o_query, o_start, C, BM)
        b_value = tl.load(p_value_new + p_first + o_new, mask=m_key, other=0.0)
        b_acc, b_max, b_sum = absorb(b_acc, b_max, b_sum, b_dot, b_value, scale2, SETTLE, DOT)
    if phantom != 0 and chunk == 0:  # C logits of 0 with zero values
        b_phantom = tl.where(o_start == 0, 1.0 * C, 0.0)
        b_new = tl.where(o_start == 0, tl.maximum(b_max, 0.0), b_max)
        b_decay = tl.exp2(b_max - b_new)
        b_acc = b_acc * b_decay[:, None]
        b_sum = b_sum * b_decay + b_phantom * tl.exp2(tl.minimum(-b_new, 0.0))
        b_max = b_new

    # Salient cache: whole blocks that every query sees, then the rest with a mask.
    b_slots = tl.maximum(o_start // C - 1, 0) * K
    b_seen = tl.minimum(b_slots, N)
    seen = tl.minimum(tl.maximum(last_chunk - 1, 0) * K, N)
    whole = tl.minimum(tl.maximum(chunk - 1, 0) * K, N) // BN * BN
    i_select = i_head // (H // HS)
    p_cached_key = cache_of(p_salient_key, row, i_select, HS, N, D, PAGES)
    p_cached_value = cache_of(p_salient_value, row, i_select, HS, N, D, PAGES)
    p_key_scale = scales_of(p_salient_key_scale, row, i_select, HS, N, CODES, PAGES)
    p_value_scale = scales_of(p_salient_value_scale, row, i_select, HS, N, CODES, PAGES)
    for s in tl.range(0, whole, BN, num_stages=STAGES):
        o_keys = slots_of(p_cached_key, p_state_row, i_batch, s, 0, D, PAGES)
        o_values = slots_of(p_cached_value, p_state_row, i_batch, s, 1, D, PAGES)
        b_key = tl.load(p_cached_key + o_keys + o_tile, mask=m_dim[None, :], other=0.0)
        o_scale = scale_slots_of(p_key_scale, p_state_row, i_batch, s, 0, CODES, PAGES) + o_slot
        b_key = as_numbers(b_key, p_key_scale, o_scale, o_slot >= 0, b_q.dtype, CODES)
        b_dot = tl.dot(b_q, tl.trans(b_key), input_precision=DOT)
        b_value = tl.load(p_cached_value + o_values + o_tile, mask=m_dim[None, :], other=0.0)
        o_scale = scale_slots_of(p_value_scale, p_state_row, i_batch, s, 1, CODES, PAGES) + o_slot
        b_value = as_numbers(b_value, p_value_scale, o_scale, o_slot >= 0, b_q.dtype, CODES)
        b_acc, b_max, b_sum = absorb(b_acc, b_max, b_sum, b_dot, b_value, scale2, SETTLE, DOT)
    for s in tl.range(whole, seen, BN, num_stages=1):
        m_slot = ((s + o_slot) < seen)[:, None] & m_dim[None, :]
        o_keys = slots_of(p_cached_key, p_state_row, i_batch, s, 0, D, PAGES)
        o_values = slots_of(p_cached_value, p_state_row, i_batch, s, 1, D, PAGES)
        b_key = tl.load(p_cached_key + o_keys + o_tile, mask=m_slot, other=0.0)
        b_value = tl.load(p_cached_value + o_values + o_tile, mask=m_slot, other=0.0)
        o_scale = scale_slots_of(p_key_scale, p_state_row, i_batch, s, 0, CODES, PAGES) + o_slot
        b_key = as_numbers(b_key, p_key_scale, o_scale, s + o_slot < seen, b_q.dtype, CODES)
        o_scale = scale_slots_of(p_value_scale, p_state_row, i_batch, s, 1, CODES, PAGES) + o_slot
        b_value = as_numbers(b_value, p_value_scale, o_scale, s + o_slot < seen, b_q.dtype, CODES)
        b_dot = tl.dot(b_q, tl.trans(b_key), input_precision=DOT)
        b_dot = tl.where((s + o_slot)[None, :] < b_seen[:, None], b_dot, float("-inf"))
        b_acc, b_max, b_sum = absorb(b_acc, b_max, b_sum, b_dot, b_value, scale2, SETTLE, DOT)
    if FACTOR:
        factor = tl.load(p_window_factor + i_head)
        b_acc = b_acc * factor
        b_sum = b_sum * factor

    # Linear part: everything older that is not salient.
    if last_chunk >= 2:
        m_linear = m_query & (o_start >= 2 * C)
        i_tile = i_batch.to(tl.int64) * n_tiles + (o_start // C - c0)
        o_linear = (i_tile * H + i_head) * C + (o_query - o_start)
        b_sum += tl.load(p_linear_sum + o_linear, mask=m_linear, other=0.0)
        m_block = m_linear[:, None] & m_dim[None, :]
        b_linear = tl.load(p_linear + o_linear[:, None] * D + o_dim[None, :], mask=m_block, other=0.0).to(tl.float32)
        if GATE:
            b_linear *= tl.load(p_gate + p_tile, mask=m_block, other=0.0).to(tl.float32)
        b_acc += b_linear
    b_out = b_acc / (b_sum + epsilon)[:, None]
    if not EVICT:  # beyond the capacity: the caller should have refused
        b_out = tl.where((b_slots > N)[:, None], float("nan"), b_out)
    b_out = tl.where(m_query[:, None], b_out, 0.0)
    tl.store(p_output + p_tile, b_out.to(p_output.dtype.element_ty), mask=m_store[:, None] & m_dim[None, :])


@triton.jit(do_not_specialize=["T", "H", "HK"], do_not_specialize_on_alignment=ROWS)
def commit_kernel(
    p_key, p_value, p_window_key, p_window_value, p_window_score, p_window_key_scale, p_window_value_scale, p_new_tokens,
    p_past_length, p_query_start, p_state_row, p_score,
    T, H, HK,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, RAGGED: tl.constexpr, PAGES: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Write the latest tokens into the window ring, after every other kernel has read it. Grid (H, B)."""
    BR: tl.constexpr = 32
    i_head = tl.program_id(0)
    i_batch = tl.program_id(1)
    row, start, length, count = row_of(
        i_batch, p_new_tokens, p_past_length, p_query_start, p_state_row, T, RAGGED, PAGES != 0
    )
    p_window_key = in_page(p_window_key, p_state_row, i_batch, 0, PAGES)
    p_window_value = in_page(p_window_value, p_state_row, i_batch, 0, PAGES)
    if CODES:
        p_window_key_scale = in_page(p_window_key_scale, p_state_row, i_batch, 0, PAGES)
        p_window_value_scale = in_page(p_window_value_scale, p_state_row, i_batch, 0, PAGES)
    p_window_score = in_page(p_window_score, p_state_row, i_batch, 0, PAGES)
    if count == 0:
        return
    end = length + count
    G = H // HK
    o_dim = tl.arange(0, DP)
    first = tl.maximum(length, end - 2 * C)
    for position in range(first, end, BR):
        o_position = position + tl.arange(0, BR)
        m_row = o_position < end
        o_slot = o_position & (2 * C - 1)
        o_token = start + o_position - length
        b_score = tl.load(p_score + o_token * H + i_head, mask=m_row, other=0.0)
        tl.store(p_window_score + (row * H + i_head) * (2 * C) + o_slot, b_score, mask=m_row)
        if i_head % G == 0:
            i_kv = i_head // G
            mask = m_row[:, None] & (o_dim < D)[None, :]
            o_from = (o_token * HK + i_kv)[:, None] * D + o_dim[None, :]
            if CODES:
                o_to = (row * HK + i_kv) * (2 * C) + o_slot
                b_key = tl.load(p_key + o_from, mask=mask, other=0.0)
                store_rows(p_window_key, p_window_key_scale, o_to, b_key, m_row, o_dim, D, CODES)
                b_value = tl.load(p_value + o_from, mask=mask, other=0.0)
                store_rows(p_window_value, p_window_value_scale, o_to, b_value, m_row, o_dim, D, CODES)
            else:
                o_to = ((row * HK + i_kv) * (2 * C) + o_slot)[:, None] * D + o_dim[None, :]
                tl.store(p_window_key + o_to, tl.load(p_key + o_from, mask=mask, other=0.0), mask=mask)
                tl.store(p_window_value + o_to, tl.load(p_value + o_from, mask=mask, other=0.0), mask=mask)
