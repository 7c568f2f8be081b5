"""Last steps of prefill: local, salient and linear attention in one epilogue, then the window ring."""

from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.hybrid_attention.triton_common import (
    LOG2E,
    feature_minus,
    feature_plus,
    feature_stats,
    load_tokens,
    load_weight,
    row_of,
)


@triton.jit
def _absorb(b_acc, b_max, b_sum, b_logit, b_v, DOT: tl.constexpr):
    """One block of logits [BM, BN] in log2 units (-inf = masked) into the running softmax; b_max stays the true maximum."""
    b_new = tl.maximum(b_max, tl.max(b_logit, 1))
    b_p = tl.exp2(b_logit - b_new[:, None])
    b_decay = tl.exp2(b_max - b_new)
    b_sum = b_sum * b_decay + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision=DOT)
    return b_acc, b_new, b_sum


@triton.jit
def _local(
    b_q, o_query, first, chunk, p_key_new, p_key_ring, p_value_new, p_value_ring, length, end, stride, scale2, phantom,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Softmax over the previous chunk and the current one up to each query."""
    o_row = tl.arange(0, BM)
    b_key = load_tokens(p_key_new, p_key_ring, o_query, length, end, stride, D, DP, C)
    b_value = load_tokens(p_value_new, p_value_ring, o_query, length, end, stride, D, DP, C)
    b_logit = tl.dot(b_q, tl.trans(b_key), input_precision=DOT) * scale2
    b_logit = tl.where(o_row[None, :] <= o_row[:, None], b_logit, float("-inf"))
    b_max = tl.max(b_logit, 1)  # the own term is always there
    b_p = tl.exp2(b_logit - b_max[:, None])
    b_sum = tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_value.dtype), b_value, input_precision=DOT)
    oldest = tl.maximum(chunk - 1, 0) * C
    for o_first in range(oldest, first, BM):
        o_key = o_first + o_row
        b_key = load_tokens(p_key_new, p_key_ring, o_key, length, end, stride, D, DP, C)
        b_value = load_tokens(p_value_new, p_value_ring, o_key, length, end, stride, D, DP, C)
        b_logit = tl.dot(b_q, tl.trans(b_key), input_precision=DOT) * scale2
        b_acc, b_max, b_sum = _absorb(b_acc, b_max, b_sum, b_logit, b_value, DOT)
    if phantom != 0 and chunk == 0:  # C logits of 0 with zero values
        b_new = tl.maximum(b_max, 0.0)
        b_decay = tl.exp2(b_max - b_new)
        b_acc = b_acc * b_decay[:, None]
        b_sum = b_sum * b_decay + C * tl.exp2(-b_new)
        b_max = b_new
    return b_acc, b_max, b_sum


@triton.jit
def _finish(
    b_acc, b_sum, b_q, o_token, m_query, chunk, slots_needed, i_head, tile, i_batch,
    p_gate, p_feature_q_weight, p_window_factor, p_prefix_kv, p_prefix_z, p_output, T_end, H, N, W_HEADS, n_tiles, epsilon,
    D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, BM: tl.constexpr, FEATURE: tl.constexpr,
    GATE: tl.constexpr, FACTOR: tl.constexpr, OVERFLOW: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Add the linear part, normalise, store one tile; rows of the padding get zeros."""
    F: tl.constexpr = 2 * P if FEATURE <= 1 else P
    o_dim = tl.arange(0, DP)
    m_dim = o_dim < D
    if FACTOR:
        factor = tl.load(p_window_factor + i_head)
        b_acc = b_acc * factor
        b_sum = b_sum * factor
    if chunk >= 2:
        o_feature = tl.arange(0, PP)
        m_feature = o_feature < P
        p_weight = p_feature_q_weight + (i_head % W_HEADS).to(tl.int64) * (P * D)
        b_weight = load_weight(p_weight, o_feature, P, D, DP)
        b_direction = tl.dot(b_q, tl.trans(b_weight), input_precision=DOT)
        b_wide = b_q.to(tl.float32)
        b_scale, b_plus, b_minus = feature_stats(b_direction, tl.sum(b_wide * b_wide, 1), m_feature, FEATURE)
        i_prefix = (i_batch.to(tl.int64) * n_tiles + tile) * H + i_head
        p_kv = p_prefix_kv + i_prefix * (F * D) + o_feature[:, None] * D + o_dim[None, :]
        p_z = p_prefix_z + i_prefix * F + o_feature
        m_kv = m_feature[:, None] & m_dim[None, :]
        b_phi = feature_plus(b_direction, b_scale, b_plus, m_feature, FEATURE)
        b_sum += tl.sum(b_phi * tl.load(p_z, mask=m_feature, other=0.0)[None, :], 1)
        b_kv = tl.load(p_kv, mask=m_kv, other=0.0)
        b_linear = tl.dot(b_phi.to(b_kv.dtype), b_kv, input_precision=DOT)
        if FEATURE <= 1:
            b_phi = feature_minus(b_direction, b_scale, b_minus, m_feature)
            b_sum += tl.sum(b_phi * tl.load(p_z + P, mask=m_feature, other=0.0)[None, :], 1)
            b_kv = tl.load(p_kv + P * D, mask=m_kv, other=0.0)
            b_linear = tl.dot(b_phi.to(b_kv.dtype), b_kv, b_linear, input_precision=DOT)
        p_tile = (o_token * H + i_head)[:, None] * D + o_dim[None, :]
        if GATE:
            b_gate = tl.load(p_gate + p_tile, mask=m_query[:, None] & m_dim[None, :], other=0.0)
            b_linear = b_linear * b_gate.to(tl.float32)
        b_acc += b_linear
    b_out = b_acc / (b_sum + epsilon)[:, None]
    if OVERFLOW == 0:
        b_out = tl.where(slots_needed > N, float("nan"), b_out)
    b_out = tl.where(m_query[:, None], b_out, 0.0)
    p_out = p_output + (o_token * H + i_head)[:, None] * D + o_dim[None, :]
    tl.store(p_out, b_out.to(p_output.dtype.element_ty), mask=T_end[:, None] & m_dim[None, :])


@triton.jit(do_not_specialize=["T", "H", "HK", "HS", "K", "N", "W_HEADS", "first_tile", "n_tiles", "phantom"])
def attend_kernel(
    p_query,
    p_key,
    p_value,
    p_gate,
    p_feature_q_weight,
    p_window_factor,
    p_window_key,
    p_window_value,
    p_salient_key,
    p_salient_value,
    p_new_tokens,
    p_past_length,
    p_query_start,
    p_state_row,
    p_prefix_kv,
    p_prefix_z,
    p_output,
    T,
    H,
    HK,
    HS,
    K,
    N,
    W_HEADS,
    first_tile,
    n_tiles,
    phantom,
    scale,
    epsilon,
    C: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PAIR: tl.constexpr,
    FEATURE: tl.constexpr,
    GATE: tl.constexpr,
    FACTOR: tl.constexpr,
    OVERFLOW: tl.constexpr,
    RAGGED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Output of the queries of chunks c0 + first_tile .. + n_tiles - 1. Grid (ceil(n_tiles * C / BM / PAIR), H, B).

    Each program has PAIR (1 or 2) blocks of BM queries; a block lies within one chunk. Two blocks share the salient rows
    they read. The longest programs start first.
    """
    SUB: tl.constexpr = C // BM
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    i_block = (tl.num_programs(0) - 1 - tl.program_id(0)) * PAIR
    row, start, length, count = row_of(i_batch, p_new_tokens, p_past_length, p_query_start, p_state_row, T, RAGGED)
    end = length + count
    c0 = length // C
    span = count if RAGGED else T
    tile_a = i_block // SUB
    chunk_a = c0 + first_tile + tile_a
    first_a = chunk_a * C + (i_block % SUB) * BM
    tile_b = (i_block + PAIR - 1) // SUB
    chunk_b = c0 + first_tile + tile_b
    first_b = chunk_b * C + ((i_block + PAIR - 1) % SUB) * BM
    if first_a >= length + span:
        return
    i_kv = i_head // (H // HK)
    o_row = tl.arange(0, BM)
    o_dim = tl.arange(0, DP)
    m_dim = o_dim < D
    scale2 = scale * LOG2E
    p_key_new = p_key + (start * HK + i_kv) * D
    p_key_ring = p_window_key + (row * HK + i_kv) * (2 * C) * D
    p_value_new = p_value + (start * HK + i_kv) * D
    p_value_ring = p_window_value + (row * HK + i_kv) * (2 * C) * D

    o_query_a = first_a + o_row
    m_query_a = (o_query_a >= length) & (o_query_a < end)
    o_token_a = start + o_query_a - length
    p_q = p_query + (o_token_a * H + i_head)[:, None] * D + o_dim[None, :]
    b_q_a = tl.load(p_q, mask=m_query_a[:, None] & m_dim[None, :], other=0.0)
    b_acc_a, b_max_a, b_sum_a = _local(
        b_q_a, o_query_a, first_a, chunk_a, p_key_new, p_key_ring, p_value_new, p_value_ring, length, end, HK * D,
        scale2, phantom, C, D, DP, BM, DOT,
    )  # fmt: skip
    slots_a = tl.maximum(chunk_a - 1, 0) * K
    seen_a = tl.minimum(slots_a, N)
    seen = seen_a
    slots_b = slots_a
    if PAIR == 2:
        o_query_b = first_b + o_row
        m_query_b = (o_query_b >= length) & (o_query_b < end)
        o_token_b = start + o_query_b - length
        p_q = p_query + (o_token_b * H + i_head)[:, None] * D + o_dim[None, :]
        b_q_b = tl.load(p_q, mask=m_query_b[:, None] & m_dim[None, :], other=0.0)
        b_acc_b, b_max_b, b_sum_b = _local(
            b_q_b, o_query_b, first_b, chunk_b, p_key_new, p_key_ring, p_value_new, p_value_ring, length, end, HK * D,
            scale2, phantom, C, D, DP, BM, DOT,
        )  # fmt: skip
        slots_b = tl.maximum(chunk_b - 1, 0) * K
        seen = tl.minimum(slots_b, N)
        if (first_b >= end) | (tile_b >= n_tiles):
            seen = seen_a

    # Salient cache: whole blocks that both tiles see, then the rest with a mask.
    i_select = i_head // (H // HS)
    base = (row * HS + i_select) * N * D
    o_slot = tl.arange(0, BN)
    whole = seen_a // BN * BN
    p_salient = base + o_slot[:, None] * D + o_dim[None, :]
    for s in range(0, whole, BN):
        b_key = tl.load(p_salient_key + p_salient + s * D, mask=m_dim[None, :], other=0.0)
        b_logit_a = tl.dot(b_q_a, tl.trans(b_key), input_precision=DOT) * scale2
        if PAIR == 2:
            b_logit_b = tl.dot(b_q_b, tl.trans(b_key), input_precision=DOT) * scale2
        b_value = tl.load(p_salient_value + p_salient + s * D, mask=m_dim[None, :], other=0.0)
        b_acc_a, b_max_a, b_sum_a = _absorb(b_acc_a, b_max_a, b_sum_a, b_logit_a, b_value, DOT)
        if PAIR == 2:
            b_acc_b, b_max_b, b_sum_b = _absorb(b_acc_b, b_max_b, b_sum_b, b_logit_b, b_value, DOT)
    for s in range(whole, seen, BN):
        m_slot = s + o_slot < seen
        b_key = tl.load(p_salient_key + p_salient + s * D, mask=m_slot[:, None] & m_dim[None, :], other=0.0)
        b_value = tl.load(p_salient_value + p_salient + s * D, mask=m_slot[:, None] & m_dim[None, :], other=0.0)
        b_logit_a = tl.dot(b_q_a, tl.trans(b_key), input_precision=DOT) * scale2
        b_logit_a = tl.where((s + o_slot < seen_a)[None, :], b_logit_a, float("-inf"))
        b_acc_a, b_max_a, b_sum_a = _absorb(b_acc_a, b_max_a, b_sum_a, b_logit_a, b_value, DOT)
        if PAIR == 2:
            b_logit_b = tl.dot(b_q_b, tl.trans(b_key), input_precision=DOT) * scale2
            b_logit_b = tl.where(m_slot[None, :], b_logit_b, float("-inf"))
            b_acc_b, b_max_b, b_sum_b = _absorb(b_acc_b, b_max_b, b_sum_b, b_logit_b, b_value, DOT)

    m_store_a = (o_query_a >= length) & (o_query_a < length + span)
    _finish(
        b_acc_a, b_sum_a, b_q_a, o_token_a, m_query_a, chunk_a, slots_a, i_head, tile_a, i_batch,
        p_gate, p_feature_q_weight, p_window_factor, p_prefix_kv, p_prefix_z, p_output, m_store_a, H, N, W_HEADS,
        n_tiles, epsilon, D, DP, P, PP, BM, FEATURE, GATE, FACTOR, OVERFLOW, DOT,
    )  # fmt: skip
    if PAIR == 2:
        if (tile_b < n_tiles) & (first_b < length + span):
            m_store_b = (o_query_b >= length) & (o_query_b < length + span)
            _finish(
                b_acc_b, b_sum_b, b_q_b, o_token_b, m_query_b, chunk_b, slots_b, i_head, tile_b, i_batch,
                p_gate, p_feature_q_weight, p_window_factor, p_prefix_kv, p_prefix_z, p_output, m_store_b, H, N, W_HEADS,
                n_tiles, epsilon, D, DP, P, PP, BM, FEATURE, GATE, FACTOR, OVERFLOW, DOT,
            )  # fmt: skip


@triton.jit(do_not_specialize=["T", "H", "HK"])
def commit_kernel(
    p_key,
    p_value,
    p_window_key,
    p_window_value,
    p_window_score,
    p_new_tokens,
    p_past_length,
    p_query_start,
    p_state_row,
    p_score,
    T,
    H,
    HK,
    C: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Write the latest tokens into the window ring, after every other kernel has read it. Grid (H, B)."""
    BR: tl.constexpr = 32
    i_head = tl.program_id(0)
    i_batch = tl.program_id(1)
    row, start, length, count = row_of(i_batch, p_new_tokens, p_past_length, p_query_start, p_state_row, T, RAGGED)
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
            o_to = ((row * HK + i_kv) * (2 * C) + o_slot)[:, None] * D + o_dim[None, :]
            tl.store(p_window_key + o_to, tl.load(p_key + o_from, mask=mask, other=0.0), mask=mask)
            tl.store(p_window_value + o_to, tl.load(p_value + o_from, mask=mask, other=0.0), mask=mask)
