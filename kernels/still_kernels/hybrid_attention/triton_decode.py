"""One token per row in one launch: salient splits, local window and linear slices, merged by the last to arrive.

Programs of one select head (GR query heads) share a counter. Every program writes its partial result, then counts itself; the
last one merges all partials of the group against the true maximum. The last group of a row then writes the window ring. The
counters are zero between launches, so the launch can be captured in a CUDA graph.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.hybrid_attention.triton_common import (
    LOG2E,
    RELEASED_EPSILON,
    feature_minus,
    feature_plus,
    feature_stats,
    load_weight,
    row_of,
    select_chunk,
    selected_offsets,
)


@triton.jit
def _gemv_block(b_max, b_sum, b_acc, b_q, p_k, p_v, m_row, m_dim):
    """Rows of a block into per-row running softmaxes; [BN], [BN], [BN, DP]. Combined over rows at the end."""
    b_k = tl.load(p_k, mask=m_row[:, None] & m_dim[None, :], other=0.0).to(tl.float32)
    b_v = tl.load(p_v, mask=m_row[:, None] & m_dim[None, :], other=0.0).to(tl.float32)
    b_logit = tl.sum(b_k * b_q[None, :], 1)
    b_new = tl.maximum(b_max, tl.where(m_row, b_logit, -1.0e30))
    b_p = tl.where(m_row, tl.exp2(b_logit - b_new), 0.0)
    b_decay = tl.exp2(b_max - b_new)
    return b_new, b_sum * b_decay + b_p, b_acc * b_decay[:, None] + b_p[:, None] * b_v


@triton.jit
def _salient_one(
    p_salient_key, p_salient_value, base, p_q, low, high, scale2, p_acc, p_ml,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Partial softmax of one query head over slots low .. high - 1."""
    o_dim = tl.arange(0, DP)
    m_dim = o_dim < D
    b_q = tl.load(p_q + o_dim, mask=m_dim, other=0.0).to(tl.float32) * scale2
    b_max = tl.full([BN], -1.0e30, tl.float32)
    b_sum = tl.zeros([BN], tl.float32)
    b_acc = tl.zeros([BN, DP], tl.float32)
    for s in range(low, high, BN):
        o_slot = s + tl.arange(0, BN)
        o_row = base + o_slot[:, None] * D + o_dim[None, :]
        b_max, b_sum, b_acc = _gemv_block(
            b_max, b_sum, b_acc, b_q, p_salient_key + o_row, p_salient_value + o_row, o_slot < high, m_dim
        )
    top = tl.max(b_max, 0)
    b_weight = tl.exp2(b_max - top)
    tl.store(p_acc + o_dim, tl.sum(b_acc * b_weight[:, None], 0), mask=m_dim)
    tl.store(p_ml, top)
    tl.store(p_ml + 1, tl.sum(b_sum * b_weight, 0))


@triton.jit
def _salient_group(
    p_salient_key, p_salient_value, base, p_query, i_query, GR, low, high, scale2, p_part_acc, p_part_ml, i_part, stride,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, GP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The same for the GR query heads of a key/value head, which read the rows once."""
    o_dim = tl.arange(0, DP)
    m_dim = o_dim < D
    o_head = tl.arange(0, GP)
    m_head = o_head < GR
    p_q = p_query + (i_query + o_head)[:, None] * D + o_dim[None, :]
    b_q = tl.load(p_q, mask=m_head[:, None] & m_dim[None, :], other=0.0)
    b_max = tl.full([GP], -1.0e30, tl.float32)
    b_sum = tl.zeros([GP], tl.float32)
    b_acc = tl.zeros([GP, DP], tl.float32)
    for s in range(low, high, BN):
        o_slot = s + tl.arange(0, BN)
        m_slot = o_slot < high
        o_row = base + o_slot[:, None] * D + o_dim[None, :]
        b_k = tl.load(p_salient_key + o_row, mask=m_slot[:, None] & m_dim[None, :], other=0.0)
        b_v = tl.load(p_salient_value + o_row, mask=m_slot[:, None] & m_dim[None, :], other=0.0)
        b_logit = tl.dot(b_q, tl.trans(b_k), input_precision=DOT) * scale2
        b_logit = tl.where(m_slot[None, :], b_logit, -1.0e30)
        b_new = tl.maximum(b_max, tl.max(b_logit, 1))
        b_p = tl.where(m_slot[None, :], tl.exp2(b_logit - b_new[:, None]), 0.0)
        b_decay = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision=DOT)
        b_max = b_new
    o_part = i_part + o_head.to(tl.int64) * stride
    tl.store(p_part_acc + o_part[:, None] * D + o_dim[None, :], b_acc, mask=m_head[:, None] & m_dim[None, :])
    tl.store(p_part_ml + o_part * 2, b_max, mask=m_head)
    tl.store(p_part_ml + o_part * 2 + 1, b_sum, mask=m_head)


@triton.jit
def _linear_slice(
    i_slice, i_head, i_select, row, length, promoting, GR, p_q, p_feature_q_weight, p_feature_k_weight, p_window_key,
    p_window_value, p_window_score, p_kv_state, p_z_state, p_lin, p_den, i_kv, H, HK, K, W_HEADS,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    RB: tl.constexpr, FEATURE: tl.constexpr, SCOPE: tl.constexpr, FUSED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """phi(q)^T S for DS value columns (and phi(q)^T z in slice 0); a promoted chunk is folded into S first."""
    F: tl.constexpr = 2 * P if FEATURE <= 1 else P
    DW: tl.constexpr = 32 if DP > 32 else DP
    o_feature = tl.arange(0, PP)
    m_feature = o_feature < P
    o_dim = tl.arange(0, DP)
    m_dim = o_dim < D
    o_column = i_slice * DS + tl.arange(0, DS)
    m_slice = m_feature[:, None] & (o_column < D)[None, :]
    p_state = p_kv_state + (row * H + i_head) * (F * D) + o_feature[:, None] * D + o_column[None, :]
    p_mass = p_z_state + (row * H + i_head) * F + o_feature
    b_plus_s = tl.load(p_state, mask=m_slice, other=0.0)
    m_mass = m_feature & (i_slice == 0)  # z belongs to slice 0
    b_plus_z = tl.load(p_mass, mask=m_mass, other=0.0)
    b_minus_s = tl.zeros([PP, DS], tl.float32)
    b_minus_z = tl.zeros([PP], tl.float32)
    if FEATURE <= 1:
        b_minus_s = tl.load(p_state + P * D, mask=m_slice, other=0.0)
        b_minus_z = tl.load(p_mass + P, mask=m_mass, other=0.0)
    w_head = (i_head % W_HEADS).to(tl.int64) * (P * D)
    b_direction = tl.zeros([PP], tl.float32)
    b_square = tl.zeros([1], tl.float32)
    for d in tl.static_range(0, DP, DW):  # in column blocks: registers decide how many programs are resident
        o_part = d + tl.arange(0, DW)
        b_q = tl.load(p_q + o_part, mask=o_part < D, other=0.0).to(tl.float32)
        p_weight = p_feature_q_weight + w_head + o_feature[:, None] * D + o_part[None, :]
        b_weight = tl.load(p_weight, mask=m_feature[:, None] & (o_part < D)[None, :], other=0.0)
        b_direction += tl.sum(b_weight.to(tl.float32) * b_q[None, :], 1)
        b_square += tl.sum(b_q * b_q, 0)
    b_direction = b_direction[None, :]
    b_scale, b_lse_plus, b_lse_minus = feature_stats(b_direction, b_square, m_feature, FEATURE)

    if FUSED:
        if promoting:
            old = length // C - 2
            b_key_weight = load_weight(p_feature_k_weight + w_head, o_feature, P, D, DP)
            o_all = tl.arange(0, C)
            b_selected, _ = select_chunk(
                p_window_score, p_window_score, old, length, length, 0, row, i_select, H, GR, K, SCOPE, C
            )
            b_flag = tl.where(b_selected, 0, 1)
            for r in range(0, C, RB):
                o_row = r + tl.arange(0, RB)
                o_ring = ((row * HK + i_kv) * (2 * C) + ((old & 1) * C + o_row)).to(tl.int64) * D
                b_k = tl.load(p_window_key + o_ring[:, None] + o_dim[None, :], mask=m_dim[None, :], other=0.0)
                m_column = (o_column < D)[None, :]
                b_v = tl.load(p_window_value + o_ring[:, None] + o_column[None, :], mask=m_column, other=0.0)
                m_row = tl.sum(tl.where(o_row[:, None] == o_all[None, :], b_flag[None, :], 0), 1) > 0
                b_dir = tl.dot(b_k, tl.trans(b_key_weight), input_precision=DOT)
                b_wide = b_k.to(tl.float32)
                b_s, b_p, b_m = feature_stats(b_dir, tl.sum(b_wide * b_wide, 1), m_feature, FEATURE)
                b_phi = tl.where(m_row[:, None], feature_plus(b_dir, b_s, b_p, m_feature, FEATURE), 0.0)
                b_plus_z += tl.sum(b_phi, 0)
                b_plus_s += tl.dot(tl.trans(b_phi.to(b_v.dtype)), b_v, input_precision=DOT)
                if FEATURE <= 1:
                    b_phi = tl.where(m_row[:, None], feature_minus(b_dir, b_s, b_m, m_feature), 0.0)
                    b_minus_z += tl.sum(b_phi, 0)
                    b_minus_s += tl.dot(tl.trans(b_phi.to(b_v.dtype)), b_v, input_precision=DOT)
            tl.store(p_state, b_plus_s, mask=m_slice)
            tl.store(p_mass, b_plus_z, mask=m_mass)
            if FEATURE <= 1:
                tl.store(p_state + P * D, b_minus_s, mask=m_slice)
                tl.store(p_mass + P, b_minus_z, mask=m_mass)
    b_phi = tl.sum(feature_plus(b_direction, b_scale, b_lse_plus, m_feature, FEATURE), 0)
    b_out = tl.sum(b_phi[:, None] * b_plus_s, 0)
    den = tl.sum(b_phi * b_plus_z, 0)
    if FEATURE <= 1:
        b_phi = tl.sum(feature_minus(b_direction, b_scale, b_lse_minus, m_feature), 0)
        b_out += tl.sum(b_phi[:, None] * b_minus_s, 0)
        den += tl.sum(b_phi * b_minus_z, 0)
    tl.store(p_lin + o_column, b_out, mask=o_column < D)
    if i_slice == 0:
        tl.store(p_den, den)


@triton.jit
def _local_part(
    i_head, i_select, g, row, i_batch, length, promoting, GR, HS, p_q, p_k, p_v, p_window_key, p_window_value,
    p_window_score, p_salient_key, p_salient_value, p_acc, p_ml, p_part_score, i_kv, H, HK, K, N, phantom, scale2,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, SCOPE: tl.constexpr,
    RELEASED: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Window of one query head: its softmax, the new token's score, and the newly selected rows on their way to the cache."""
    o_dim = tl.arange(0, DP)
    m_dim = o_dim < D
    chunk = length // C
    b_q = tl.load(p_q + o_dim, mask=m_dim, other=0.0).to(tl.float32) * scale2
    b_own_k = tl.load(p_k + o_dim, mask=m_dim, other=0.0).to(tl.float32)
    b_own_v = tl.load(p_v + o_dim, mask=m_dim, other=0.0).to(tl.float32)
    own = tl.sum(b_q * b_own_k, 0)
    ring = (row * HK + i_kv) * (2 * C)
    b_max = tl.full([BN], -1.0e30, tl.float32)
    b_sum = tl.zeros([BN], tl.float32)
    b_acc = tl.zeros([BN, DP], tl.float32)
    w_max = tl.full([BN], -1.0e30, tl.float32)
    w_sum = tl.zeros([BN], tl.float32)
    for s in range(0, 2 * C, BN):
        o_slot = s + tl.arange(0, BN)
        o_back = (length - 1 - o_slot) & (2 * C - 1)
        o_position = length - 1 - o_back
        m_row = (o_position >= 0) & (o_position >= (chunk - 1) * C)
        m_window = m_row & (o_position > length - C)
        o_row = (ring + o_slot)[:, None] * D + o_dim[None, :]
        mask = m_row[:, None] & m_dim[None, :]
        b_k = tl.load(p_window_key + o_row, mask=mask, other=0.0).to(tl.float32)
        b_v = tl.load(p_window_value + o_row, mask=mask, other=0.0).to(tl.float32)
        b_logit = tl.sum(b_k * b_q[None, :], 1)
        b_new = tl.maximum(b_max, tl.where(m_row, b_logit, -1.0e30))
        b_p = tl.where(m_row, tl.exp2(b_logit - b_new), 0.0)
        b_decay = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_decay + b_p
        b_acc = b_acc * b_decay[:, None] + b_p[:, None] * b_v
        b_max = b_new
        w_new = tl.maximum(w_max, tl.where(m_window, b_logit, -1.0e30))
        w_sum = w_sum * tl.exp2(w_max - w_new) + tl.where(m_window, tl.exp2(b_logit - w_new), 0.0)
        w_max = w_new
    others = tl.max(w_max, 0)
    others_sum = tl.sum(w_sum * tl.exp2(w_max - others), 0)
    score = (own - others - tl.log2(others_sum)) / LOG2E
    if RELEASED:
        top_w = tl.maximum(others, own)
        total = others_sum * tl.exp2(others - top_w) + tl.exp2(own - top_w)
        score = 0.0
        for s in range(0, C, BN):
            o_back = s + tl.arange(0, BN)  # age: 0 is the token itself
            o_position = length - o_back
            m_in = (o_position >= 0) & (o_back < C)
            m_old = m_in & (o_back > 0)
            o_row = (ring + (o_position & (2 * C - 1)))[:, None] * D + o_dim[None, :]
            b_k = tl.load(p_window_key + o_row, mask=m_old[:, None] & m_dim[None, :], other=0.0).to(tl.float32)
            b_logit = tl.sum(b_k * b_q[None, :], 1)
            b_logit = tl.where(o_back == 0, own, b_logit)
            b_p = tl.where(m_in, tl.exp2(b_logit - top_w) / total, 0.0)
            b_without = tl.where(m_old, tl.exp2(b_logit - others) / others_sum, 0.0)
            b_p = (b_p + RELEASED_EPSILON) / (1 + C * RELEASED_EPSILON)
            b_without = (b_without + RELEASED_EPSILON) / (1 + C * RELEASED_EPSILON + 1.0 / C)
            # The window covers every slot once, so an empty slot C-1 is found here as well.
            b_without = tl.where((o_position & (C - 1)) == C - 1, 1.0 / C + RELEASED_EPSILON, b_without)
            b_term = b_p * tl.log(b_p / (b_without + RELEASED_EPSILON))
            score += tl.sum(tl.where(o_back < C, b_term, 0.0), 0)
    tl.store(p_part_score, tl.where(length == 0, float("inf"), score))

    top = tl.maximum(tl.max(b_max, 0), own)
    if phantom != 0 and chunk == 0:
        top = tl.maximum(top, 0.0)
    fresh_sum = 0.0
    b_fresh = tl.zeros([DP], tl.float32)
    if FUSED:
        if promoting:
            # The rows that enter the cache now count in softmax; other programs read only older slots.
            old = chunk - 2
            b_selected, _ = select_chunk(
                p_window_score, p_window_score, old, length, length, 0, row, i_select, H, GR, K, SCOPE, C
            )
            o_rank = tl.arange(0, KP)
            m_rank = (o_rank < K) & (old * K + o_rank < N)
            b_offset = selected_offsets(b_selected, KP, C)
            o_row = (ring + (old & 1) * C + b_offset)[:, None] * D + o_dim[None, :]
            mask = m_rank[:, None] & m_dim[None, :]
            b_k = tl.load(p_window_key + o_row, mask=mask, other=0.0)
            b_v = tl.load(p_window_value + o_row, mask=mask, other=0.0)
            if g == 0:
                o_to = ((row * HS + i_select) * N + old * K + o_rank)[:, None] * D + o_dim[None, :]
                tl.store(p_salient_key + o_to, b_k, mask=mask)
                tl.store(p_salient_value + o_to, b_v, mask=mask)
            b_logit = tl.sum(b_k.to(tl.float32) * b_q[None, :], 1)
            b_logit = tl.where(m_rank, b_logit, -1.0e30)
            top = tl.maximum(top, tl.max(b_logit, 0))
            b_p = tl.where(m_rank, tl.exp2(b_logit - top), 0.0)
            fresh_sum = tl.sum(b_p, 0)
            b_fresh = tl.sum(b_p[:, None] * b_v.to(tl.float32), 0)
    b_weight = tl.exp2(b_max - top)
    own_p = tl.exp2(own - top)
    total_sum = tl.sum(b_sum * b_weight, 0) + own_p + fresh_sum
    b_total = tl.sum(b_acc * b_weight[:, None], 0) + own_p * b_own_v + b_fresh
    if phantom != 0 and chunk == 0:
        total_sum += C * tl.exp2(-top)
    tl.store(p_acc + o_dim, b_total, mask=m_dim)
    tl.store(p_ml, top)
    tl.store(p_ml + 1, total_sum)


@triton.jit
def _merge(
    i_row, i_token, i_head, chunk, K, N, parts, epsilon, p_part_acc, p_part_ml, p_part_lin, p_part_den, p_gate,
    p_window_factor, p_output, D: tl.constexpr, DP: tl.constexpr, GATE: tl.constexpr, FACTOR: tl.constexpr,
    OVERFLOW: tl.constexpr,
):  # fmt: skip
    """Combine the partials of one query head against their global maximum, add the linear part, normalise, store."""
    BS: tl.constexpr = 32
    o_dim = tl.arange(0, DP)
    m_dim = o_dim < D
    b_max = tl.full([BS], -1.0e30, tl.float32)
    b_sum = tl.zeros([BS], tl.float32)
    b_acc = tl.zeros([BS, DP], tl.float32)
    for s in range(0, parts, BS):
        o_part = s + tl.arange(0, BS)
        m_part = o_part < parts
        o_from = i_row * parts + o_part
        b_m = tl.load(p_part_ml + o_from * 2, mask=m_part, other=-1.0e30)
        b_l = tl.load(p_part_ml + o_from * 2 + 1, mask=m_part, other=0.0)
        p_acc = p_part_acc + o_from[:, None] * D + o_dim[None, :]
        b_a = tl.load(p_acc, mask=m_part[:, None] & m_dim[None, :], other=0.0)
        b_new = tl.maximum(b_max, b_m)
        b_decay = tl.exp2(b_max - b_new)
        b_weight = tl.exp2(b_m - b_new)
        b_sum = b_sum * b_decay + b_l * b_weight
        b_acc = b_acc * b_decay[:, None] + b_a * b_weight[:, None]
        b_max = b_new
    top = tl.max(b_max, 0)
    b_weight = tl.exp2(b_max - top)
    total = tl.sum(b_sum * b_weight, 0)
    b_out = tl.sum(b_acc * b_weight[:, None], 0)
    if FACTOR:
        factor = tl.load(p_window_factor + i_head)
        total = total * factor
        b_out = b_out * factor
    b_linear = tl.load(p_part_lin + i_row * D + o_dim, mask=m_dim, other=0.0)
    if GATE:
        b_linear = b_linear * tl.load(p_gate + i_token * D + o_dim, mask=m_dim, other=0.0).to(tl.float32)
    b_out = (b_out + b_linear) / (total + tl.load(p_part_den + i_row) + epsilon)
    if OVERFLOW == 0:
        b_out = tl.where(tl.maximum(chunk - 1, 0) * K > N, float("nan"), b_out)
    tl.store(p_output + i_token * D + o_dim, b_out.to(p_output.dtype.element_ty), mask=m_dim)


@triton.jit
def _commit_token(
    p_key, p_value, p_window_key, p_window_value, p_window_score, p_part_score, row, start, i_batch, length, H, HK,
    C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write the token's key, value and scores into the ring: nothing reads the slot any more."""
    BW: tl.constexpr = 1024
    slot = length & (2 * C - 1)
    for s in range(0, HK * D, BW):
        o_flat = s + tl.arange(0, BW)
        m_flat = o_flat < HK * D
        o_to = ((row * HK + o_flat // D) * (2 * C) + slot) * D + o_flat % D
        b_key = tl.load(p_key + start * HK * D + o_flat, mask=m_flat, other=0.0)
        b_value = tl.load(p_value + start * HK * D + o_flat, mask=m_flat, other=0.0)
        tl.store(p_window_key + o_to, b_key, mask=m_flat)
        tl.store(p_window_value + o_to, b_value, mask=m_flat)
    for s in range(0, H, 128):
        o_head = s + tl.arange(0, 128)
        b_score = tl.load(p_part_score + i_batch.to(tl.int64) * H + o_head, mask=o_head < H, other=0.0)
        tl.store(p_window_score + (row * H + o_head) * (2 * C) + slot, b_score, mask=o_head < H)


@triton.jit(do_not_specialize=["H", "HK", "K", "N", "W_HEADS", "NS", "phantom"])
def decode_kernel(
    p_query,
    p_key,
    p_value,
    p_gate,
    p_feature_q_weight,
    p_feature_k_weight,
    p_window_factor,
    p_window_key,
    p_window_value,
    p_window_score,
    p_salient_key,
    p_salient_value,
    p_kv_state,
    p_z_state,
    p_new_tokens,
    p_past_length,
    p_query_start,
    p_state_row,
    p_part_acc,
    p_part_ml,
    p_part_lin,
    p_part_den,
    p_part_score,
    p_counters,
    p_output,
    H,
    HK,
    K,
    N,
    W_HEADS,
    NS,
    phantom,
    scale,
    epsilon,
    C: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,
    KP: tl.constexpr,
    GP: tl.constexpr,
    DS: tl.constexpr,
    BN: tl.constexpr,
    BL: tl.constexpr,
    RB: tl.constexpr,
    FEATURE: tl.constexpr,
    SCOPE: tl.constexpr,
    RELEASED: tl.constexpr,
    OVERFLOW: tl.constexpr,
    GATE: tl.constexpr,
    FACTOR: tl.constexpr,
    RAGGED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Output of one token per row (rows with new_tokens 0 get zeros). Grid (GR * (1 + D / DS) + NS, HS, B).

    With overflow "error" a promotion is part of this launch; with a folding policy it has happened before (select, scan).
    """
    ND: tl.constexpr = DP // DS
    FUSED: tl.constexpr = OVERFLOW == 0
    i_role = tl.program_id(0)
    i_select = tl.program_id(1)
    i_batch = tl.program_id(2)
    HS = tl.num_programs(1)
    GR = H // HS
    row, start, length, count = row_of(i_batch, p_new_tokens, p_past_length, p_query_start, p_state_row, 1, RAGGED)
    i_group = i_batch.to(tl.int64) * H + i_select * GR  # first query head of the group in [B, H]
    o_dim = tl.arange(0, DP)
    m_dim = o_dim < D
    if count == 0:
        if not RAGGED:
            if i_role < GR:
                tl.store(
                    p_output + (i_group + i_role) * D + o_dim,
                    tl.zeros([DP], p_output.dtype.element_ty),
                    mask=m_dim,
                )
        return
    i_out = start * H + i_select * GR  # the same in the packed activations
    chunk = length // C
    promoting = (length % C == 0) & (chunk >= 2)
    scale2 = scale * LOG2E
    parts = NS + 1
    if i_role < GR * (1 + ND):
        g = i_role // (1 + ND)
        i_job = i_role % (1 + ND)
        i_head = i_select * GR + g
        i_kv = i_head // (H // HK)
        p_q = p_query + (i_out + g) * D
        if i_job < ND:
            _linear_slice(
                i_job, i_head, i_select, row, length, promoting, GR, p_q, p_feature_q_weight, p_feature_k_weight,
                p_window_key, p_window_value, p_window_score, p_kv_state, p_z_state, p_part_lin + (i_group + g) * D,
                p_part_den + i_group + g, i_kv, H, HK, K, W_HEADS, C, D, DP, DS, P, PP, RB, FEATURE, SCOPE, FUSED, DOT,
            )  # fmt: skip
        else:
            i_part = (i_group + g) * parts + NS
            _local_part(
                i_head, i_select, g, row, i_batch, length, promoting, GR, HS, p_q, p_key + (start * HK + i_kv) * D,
                p_value + (start * HK + i_kv) * D, p_window_key, p_window_value, p_window_score, p_salient_key,
                p_salient_value, p_part_acc + i_part * D, p_part_ml + i_part * 2, p_part_score + i_group + g, i_kv, H,
                HK, K, N, phantom, scale2, C, D, DP, KP, BL, SCOPE, RELEASED, FUSED,
            )  # fmt: skip
    else:
        i_split = i_role - GR * (1 + ND)
        seen = tl.maximum(chunk - 1, 0) * K
        if FUSED:
            seen = tl.where(promoting, seen - K, seen)
        seen = tl.minimum(seen, N)
        share = (seen + NS * BN - 1) // (NS * BN) * BN
        low = tl.minimum(i_split * share, seen)
        high = tl.minimum(low + share, seen)
        base = (row * HS + i_select) * N * D
        if SCOPE == 0:
            i_part = i_group * parts + i_split
            _salient_one(
                p_salient_key, p_salient_value, base, p_query + i_out * D, low, high, scale2, p_part_acc + i_part * D,
                p_part_ml + i_part * 2, D, DP, BN,
            )  # fmt: skip
        else:
            _salient_group(
                p_salient_key, p_salient_value, base, p_query, i_out, GR, low, high, scale2, p_part_acc, p_part_ml,
                i_group * parts + i_split, parts, D, DP, BN, GP, DOT,
            )  # fmt: skip

    tl.debug_barrier()
    p_counter = p_counters + i_batch * (2 * H) + i_select
    if tl.atomic_add(p_counter, 1, sem="acq_rel") != GR * (1 + ND) + NS - 1:
        return
    tl.store(p_counter, 0)
    for g in range(GR):
        _merge(
            i_group + g, i_out + g, i_select * GR + g, chunk, K, N, parts, epsilon, p_part_acc, p_part_ml, p_part_lin,
            p_part_den, p_gate, p_window_factor, p_output, D, DP, GATE, FACTOR, OVERFLOW,
        )  # fmt: skip
    tl.debug_barrier()
    p_counter = p_counters + i_batch * (2 * H) + H
    if tl.atomic_add(p_counter, 1, sem="acq_rel") != HS - 1:
        return
    tl.store(p_counter, 0)
    _commit_token(
        p_key, p_value, p_window_key, p_window_value, p_window_score, p_part_score, row, start, i_batch, length, H, HK, C, D,
    )  # fmt: skip
