"""One token per row in one launch: salient splits, parts of the window and slices of S, merged by the last to arrive.

Programs of one select head (GR query heads) share a counter. Every program writes its partial result, then counts itself; the
last one merges all partials of the group against the true maximum. The counters are zero between launches, so the launch can
be captured in a CUDA graph. What a step costs beyond its bytes is a chain of dependent loads, so each role issues its loads
together and reduces as little as it can.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.hybrid_attention.triton_common import (
    FEATURE_FLOOR,
    LOG2E,
    RELEASED_EPSILON,
    direction_scale,
    feature_pair,
    load_weight,
    plain_features,
    row_of,
    select_chunk,
    selected_offsets,
)

FAR = tl.constexpr(-1.0e30)  # below every logit, and finite: differences stay numbers


@triton.jit
def _salient_one(
    p_key, p_value, p_q, low, high, scale2, p_acc, p_ml, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Partial softmax of one query head over slots low .. high - 1: a running softmax per row, combined at the end."""
    o_dim = tl.arange(0, DP)
    m_dim = o_dim < D
    o_slot = low + tl.arange(0, BN)
    o_tile = o_slot[:, None] * D + o_dim[None, :]
    mask = (o_slot < high)[:, None] & m_dim[None, :]
    b_k = tl.load(p_key + o_tile, mask=mask, other=0.0)
    b_v = tl.load(p_value + o_tile, mask=mask, other=0.0)
    b_q = tl.load(p_q + o_dim, mask=m_dim, other=0.0).to(tl.float32) * scale2
    b_max = tl.full([BN], FAR, tl.float32)
    b_sum = tl.zeros([BN], tl.float32)
    b_acc = tl.zeros([BN, DP], tl.float32)
    for s in range(low, high, BN):
        m_row = s + tl.arange(0, BN) < high
        mask = (s + BN + tl.arange(0, BN) < high)[:, None] & m_dim[None, :]
        b_next_k = tl.load(p_key + (s - low + BN) * D + o_tile, mask=mask, other=0.0)  # the next block is on its way
        b_next_v = tl.load(p_value + (s - low + BN) * D + o_tile, mask=mask, other=0.0)
        b_logit = tl.where(m_row, tl.sum(b_k.to(tl.float32) * b_q[None, :], 1), FAR)
        b_new = tl.maximum(b_max, b_logit)
        b_p = tl.where(m_row, tl.exp2(b_logit - b_new), 0.0)
        b_decay = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_decay + b_p
        b_acc = b_acc * b_decay[:, None] + b_p[:, None] * b_v.to(tl.float32)
        b_max = b_new
        b_k = b_next_k
        b_v = b_next_v
    top = tl.max(b_max, 0)
    b_weight = tl.exp2(b_max - top)
    tl.store(p_acc + o_dim, tl.sum(b_acc * b_weight[:, None], 0), mask=m_dim)
    tl.store(p_ml, top)
    tl.store(p_ml + 1, tl.sum(b_sum * b_weight, 0))


@triton.jit
def _salient_group(
    p_key, p_value, p_query, i_query, GR, low, high, scale2, p_part_acc, p_part_ml, i_part, stride,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, GP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The same for the GR query heads of a key/value head, which read the rows once."""
    o_dim = tl.arange(0, DP)
    m_dim = o_dim < D
    o_head = tl.arange(0, GP)
    m_head = o_head < GR
    o_slot = low + tl.arange(0, BN)
    o_tile = o_slot[:, None] * D + o_dim[None, :]
    mask = (o_slot < high)[:, None] & m_dim[None, :]
    b_k = tl.load(p_key + o_tile, mask=mask, other=0.0)
    b_v = tl.load(p_value + o_tile, mask=mask, other=0.0)
    p_q = p_query + (i_query + o_head)[:, None] * D + o_dim[None, :]
    b_q = tl.load(p_q, mask=m_head[:, None] & m_dim[None, :], other=0.0)
    b_max = tl.full([GP], FAR, tl.float32)
    b_sum = tl.zeros([GP], tl.float32)
    b_acc = tl.zeros([GP, DP], tl.float32)
    for s in range(low, high, BN):
        m_slot = s + tl.arange(0, BN) < high
        mask = (s + BN + tl.arange(0, BN) < high)[:, None] & m_dim[None, :]
        b_next_k = tl.load(p_key + (s - low + BN) * D + o_tile, mask=mask, other=0.0)
        b_next_v = tl.load(p_value + (s - low + BN) * D + o_tile, mask=mask, other=0.0)
        b_logit = tl.dot(b_q, tl.trans(b_k), input_precision=DOT) * scale2
        b_logit = tl.where(m_slot[None, :], b_logit, FAR)
        b_new = tl.maximum(b_max, tl.max(b_logit, 1))
        b_p = tl.where(m_slot[None, :], tl.exp2(b_logit - b_new[:, None]), 0.0)
        b_decay = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision=DOT)
        b_max = b_new
        b_k = b_next_k
        b_v = b_next_v
    o_part = i_part + o_head.to(tl.int64) * stride
    tl.store(p_part_acc + o_part[:, None] * D + o_dim[None, :], b_acc, mask=m_head[:, None] & m_dim[None, :])
    tl.store(p_part_ml + o_part * 2, b_max, mask=m_head)
    tl.store(p_part_ml + o_part * 2 + 1, b_sum, mask=m_head)


@triton.jit
def _fold_chunk(
    b_plus_s, b_minus_s, b_plus_z, b_minus_z, old, length, row, i_select, i_kv, GR, p_weight, p_window_key, p_window_value,
    p_window_score, H, HK, K, o_column, C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DK: tl.constexpr,
    P: tl.constexpr, PP: tl.constexpr, GP: tl.constexpr, RB: tl.constexpr, FEATURE: tl.constexpr, SCOPE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Add the unselected tokens of chunk `old`, which lies in the ring, to a slice of S and to z."""
    o_feature = tl.arange(0, PP)
    o_dim = tl.arange(0, DK)
    b_weight = load_weight(p_weight, o_feature, o_dim, P, D)
    b_selected, _ = select_chunk(
        p_window_score, p_window_score, old, length, length, 0, row, i_select, H, GR, K, SCOPE, GP, C
    )
    for r in range(0, C, RB):
        o_row = r + tl.arange(0, RB)
        o_ring = ((row * HK + i_kv) * (2 * C) + ((old & 1) * C + o_row)).to(tl.int64) * D
        b_v = tl.load(p_window_value + o_ring[:, None] + o_column[None, :], mask=(o_column < D)[None, :], other=0.0)
        if RB == C:
            m_row = b_selected == 0
        else:
            m_here = o_row[:, None] == tl.arange(0, C)[None, :]
            m_row = tl.sum((m_here & (b_selected == 0)[None, :]).to(tl.int32), 1) > 0
        b_direction = tl.zeros([RB, PP], tl.float32)
        b_square = tl.zeros([RB], tl.float32)
        for d in range(0, DP, DK):
            o_part = d + o_dim
            b_k = tl.load(p_window_key + o_ring[:, None] + o_part[None, :], mask=(o_part < D)[None, :], other=0.0)
            if DK < DP:
                b_weight = load_weight(p_weight, o_feature, o_part, P, D)
            b_direction = tl.dot(b_k, tl.trans(b_weight), b_direction, input_precision=DOT)
            b_square += tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), 1)
        b_plus, b_minus = feature_pair(b_direction, b_square, P, PP, FEATURE)
        b_plus = tl.where(m_row[:, None], b_plus, 0.0)
        b_plus_z += tl.sum(b_plus, 0)
        b_plus_s += tl.dot(tl.trans(b_plus.to(b_v.dtype)), b_v, input_precision=DOT)
        if FEATURE <= 1:
            b_minus = tl.where(m_row[:, None], b_minus, 0.0)
            b_minus_z += tl.sum(b_minus, 0)
            b_minus_s += tl.dot(tl.trans(b_minus.to(b_v.dtype)), b_v, input_precision=DOT)
    return b_plus_s, b_minus_s, b_plus_z, b_minus_z


@triton.jit
def _linear_slice(
    i_slice, i_head, i_select, row, length, promoting, GR, p_q, p_feature_q_weight, p_feature_k_weight, p_window_key,
    p_window_value, p_window_score, p_kv_state, p_z_state, p_lin, p_den, i_kv, H, HK, K, W_HEADS,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DK: tl.constexpr, DS: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    GP: tl.constexpr, RB: tl.constexpr, FEATURE: tl.constexpr, SCOPE: tl.constexpr, FUSED: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """phi(q)^T S for DS value columns (and phi(q)^T z in slice 0); a promoted chunk is folded into S first."""
    F: tl.constexpr = 2 * P if FEATURE <= 1 else P
    DW: tl.constexpr = 32 if DP > 32 else DP
    o_feature = tl.arange(0, PP)
    m_feature = o_feature < P
    o_column = i_slice * DS + tl.arange(0, DS)
    m_slice = m_feature[:, None] & (o_column < D)[None, :]
    p_state = p_kv_state + (row * H + i_head) * (F * D) + o_feature[:, None] * D + o_column[None, :]
    p_mass = p_z_state + (row * H + i_head) * F + o_feature
    m_mass = m_feature & (i_slice == 0)  # z belongs to slice 0
    b_plus_s = tl.load(p_state, mask=m_slice, other=0.0)
    b_plus_z = tl.load(p_mass, mask=m_mass, other=0.0)
    if FEATURE <= 1:
        b_minus_s = tl.load(p_state + P * D, mask=m_slice, other=0.0)
        b_minus_z = tl.load(p_mass + P, mask=m_mass, other=0.0)
    else:
        b_minus_s = tl.zeros([PP, DS], tl.float32)
        b_minus_z = tl.zeros([PP], tl.float32)
    w_head = (i_head % W_HEADS).to(tl.int64) * (P * D)
    b_direction = tl.zeros([PP], tl.float32)
    for d in tl.static_range(0, DP, DW):  # in column blocks: registers decide how many programs are resident
        o_part = d + tl.arange(0, DW)
        b_part = tl.load(p_q + o_part, mask=o_part < D, other=0.0).to(tl.float32)
        p_weight = p_feature_q_weight + w_head + o_feature[:, None] * D + o_part[None, :]
        b_weight = tl.load(p_weight, mask=m_feature[:, None] & (o_part < D)[None, :], other=0.0)
        b_direction += tl.sum(b_weight.to(tl.float32) * b_part[None, :], 1)
    if FUSED:
        if promoting:
            b_plus_s, b_minus_s, b_plus_z, b_minus_z = _fold_chunk(
                b_plus_s, b_minus_s, b_plus_z, b_minus_z, length // C - 2, length, row, i_select, i_kv, GR,
                p_feature_k_weight + w_head, p_window_key, p_window_value, p_window_score, H, HK, K, o_column, C, D, DP,
                DK, P, PP, GP, RB, FEATURE, SCOPE, DOT,
            )  # fmt: skip
            tl.store(p_state, b_plus_s, mask=m_slice)
            tl.store(p_mass, b_plus_z, mask=m_mass)
            if FEATURE <= 1:
                tl.store(p_state + P * D, b_minus_s, mask=m_slice)
                tl.store(p_mass + P, b_minus_z, mask=m_mass)

    # Features of the query: both halves share each reduction.
    if FEATURE <= 2:
        square = 1.0
        norm_square = 1.0
        if FEATURE == 0:
            o_dim = tl.arange(0, DP)
            b_q = tl.load(p_q + o_dim, mask=o_dim < D, other=0.0).to(tl.float32)
            square = tl.sum(b_q * b_q, 0)
            norm_square = tl.sum(b_direction * b_direction, 0)
        one = tl.full([1], 1.0, tl.float32)
        b_scale = direction_scale(one * norm_square, one * square, FEATURE)
        b_sign = 1.0 - 2.0 * tl.arange(0, 2).to(tl.float32)
        b_u = (b_direction * b_scale)[None, :] * b_sign[:, None]
        b_u = tl.where(m_feature[None, :], b_u, float("-inf"))
        b_e = tl.exp2(b_u - tl.max(b_u, 1)[:, None])
        b_both = tl.where(m_feature[None, :], tl.maximum(b_e / tl.sum(b_e, 1)[:, None], FEATURE_FLOOR), 0.0)
        b_phi = tl.sum(tl.where(b_sign[:, None] > 0, b_both, 0.0), 0)
        b_psi = tl.sum(tl.where(b_sign[:, None] < 0, b_both, 0.0), 0)
    else:
        b_phi = tl.where(m_feature, plain_features(b_direction, FEATURE), 0.0)
        b_psi = b_phi
    b_out = b_phi[:, None] * b_plus_s
    b_den = b_phi * b_plus_z
    if FEATURE <= 1:
        b_out += b_psi[:, None] * b_minus_s
        b_den += b_psi * b_minus_z
    tl.store(p_lin + o_column, tl.sum(b_out, 0), mask=o_column < D)
    if i_slice == 0:
        tl.store(p_den, tl.sum(b_den, 0))


@triton.jit
def _window_part(
    i_part, i_head, row, length, p_q, p_k, p_v, p_window_key, p_window_value, p_acc, p_ml, p_window, i_kv, G, HK, phantom,
    scale2, may_write, C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BL: tl.constexpr, RELEASED: tl.constexpr,
):  # fmt: skip
    """BL slots of the ring for one query head; part 0 adds the token itself. p_window gets what the score needs.

    That is (maximum, sum) of the window's other logits, then the own logit, or with RELEASED part 0 the whole score.
    """
    o_dim = tl.arange(0, DP)
    m_dim = o_dim < D
    chunk = length // C
    ring = (row * HK + i_kv) * (2 * C)
    o_slot = i_part * BL + tl.arange(0, BL)
    o_back = (length - 1 - o_slot) & (2 * C - 1)
    o_position = length - 1 - o_back
    m_row = (o_position >= 0) & (o_position >= (chunk - 1) * C)
    m_window = m_row & (o_position > length - C)
    o_row = (ring + o_slot)[:, None] * D + o_dim[None, :]
    mask = m_row[:, None] & m_dim[None, :]
    b_k = tl.load(p_window_key + o_row, mask=mask, other=0.0)
    b_v = tl.load(p_window_value + o_row, mask=mask, other=0.0)
    b_q = tl.load(p_q + o_dim, mask=m_dim, other=0.0).to(tl.float32) * scale2
    b_own_k = tl.load(p_k + o_dim, mask=m_dim, other=0.0)
    b_own_v = tl.load(p_v + o_dim, mask=m_dim, other=0.0)
    own = tl.sum(b_q * b_own_k.to(tl.float32), 0)
    b_logit = tl.where(m_row, tl.sum(b_k.to(tl.float32) * b_q[None, :], 1), FAR)
    top = tl.max(b_logit, 0)
    others = tl.max(tl.where(m_window, b_logit, FAR), 0)
    others_sum = tl.sum(tl.where(m_window, tl.exp2(b_logit - others), 0.0), 0)
    if i_part == 0:
        top = tl.maximum(top, own)
        if phantom != 0 and chunk == 0:
            top = tl.maximum(top, 0.0)
    b_p = tl.where(m_row, tl.exp2(b_logit - top), 0.0)
    total = tl.sum(b_p, 0)
    b_total = tl.sum(b_p[:, None] * b_v.to(tl.float32), 0)
    if i_part == 0:
        own_p = tl.exp2(own - top)
        total += own_p
        b_total += own_p * b_own_v.to(tl.float32)
        if phantom != 0 and chunk == 0:
            total += C * tl.exp2(-top)
    tl.store(p_acc + o_dim, b_total, mask=m_dim)
    tl.store(p_ml, top)
    tl.store(p_ml + 1, total)
    tl.store(p_window, others)
    tl.store(p_window + 1, others_sum)
    tl.store(p_window + 2, own)
    if RELEASED:
        if i_part == 0:
            tl.store(p_window + 3, _released_score(b_q, own, length, ring, p_window_key, C, D, DP))
    if may_write and (i_part == 0) and (i_head % G == 0):
        # Nothing reads the token's slot, unless its old chunk is being promoted.
        o_to = (ring + (length & (2 * C - 1))) * D + o_dim
        tl.store(p_window_key + o_to, b_own_k, mask=m_dim)
        tl.store(p_window_value + o_to, b_own_v, mask=m_dim)


@triton.jit
def _released_score(b_q, own, length, ring, p_window_key, C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Score of the released training code for the new token; the window covers every slot modulo C once."""
    BN: tl.constexpr = 32
    o_dim = tl.arange(0, DP)
    b_max = tl.full([BN], FAR, tl.float32)
    b_sum = tl.zeros([BN], tl.float32)
    for s in range(0, C, BN):
        o_back = s + tl.arange(0, BN)
        m_old = (o_back > 0) & (length - o_back >= 0)
        b_logit = _ring_logits(b_q, length - o_back, m_old, ring, p_window_key, o_dim, C, D)
        b_new = tl.maximum(b_max, tl.where(m_old, b_logit, FAR))
        b_sum = b_sum * tl.exp2(b_max - b_new) + tl.where(m_old, tl.exp2(b_logit - b_new), 0.0)
        b_max = b_new
    others = tl.max(b_max, 0)
    others_sum = tl.sum(b_sum * tl.exp2(b_max - others), 0)
    top = tl.maximum(others, own)
    total = others_sum * tl.exp2(others - top) + tl.exp2(own - top)
    score = own * 0.0
    for s in range(0, C, BN):
        o_back = s + tl.arange(0, BN)  # age: 0 is the token itself
        o_position = length - o_back
        m_in = o_position >= 0
        m_old = m_in & (o_back > 0)
        b_logit = _ring_logits(b_q, o_position, m_old, ring, p_window_key, o_dim, C, D)
        b_logit = tl.where(o_back == 0, own, b_logit)
        b_p = tl.where(m_in, tl.exp2(b_logit - top) / total, 0.0)
        b_without = tl.where(m_old, tl.exp2(b_logit - others) / others_sum, 0.0)
        b_p = (b_p + RELEASED_EPSILON) / (1 + C * RELEASED_EPSILON)
        b_without = (b_without + RELEASED_EPSILON) / (1 + C * RELEASED_EPSILON + 1.0 / C)
        b_without = tl.where((o_position & (C - 1)) == C - 1, 1.0 / C + RELEASED_EPSILON, b_without)
        score += tl.sum(b_p * tl.log(b_p / (b_without + RELEASED_EPSILON)), 0)
    return score


@triton.jit
def _ring_logits(b_q, o_position, m_row, ring, p_window_key, o_dim, C: tl.constexpr, D: tl.constexpr):
    """Logits (log2 units) of the scaled query to ring rows at absolute positions; 0 outside m_row."""
    o_row = (ring + (o_position & (2 * C - 1)))[:, None] * D + o_dim[None, :]
    b_k = tl.load(p_window_key + o_row, mask=m_row[:, None] & (o_dim < D)[None, :], other=0.0)
    return tl.sum(b_k.to(tl.float32) * b_q[None, :], 1)


@triton.jit
def _fresh_part(
    old, i_select, g, row, length, GR, HS, p_q, p_window_key, p_window_value, p_window_score, p_salient_key,
    p_salient_value, p_acc, p_ml, i_kv, H, HK, K, N, scale2, C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    KP: tl.constexpr, GP: tl.constexpr, SCOPE: tl.constexpr,
):  # fmt: skip
    """Rows of chunk `old` that enter the cache in this step: their softmax, and their copies for later steps."""
    o_dim = tl.arange(0, DP)
    m_dim = o_dim < D
    b_q = tl.load(p_q + o_dim, mask=m_dim, other=0.0).to(tl.float32) * scale2
    b_selected, _ = select_chunk(
        p_window_score, p_window_score, old, length, length, 0, row, i_select, H, GR, K, SCOPE, GP, C
    )
    o_rank = tl.arange(0, KP)
    m_rank = (o_rank < K) & (old * K + o_rank < N)
    o_from = (row * HK + i_kv) * (2 * C) + (old & 1) * C + selected_offsets(b_selected, KP, C)
    o_row = o_from[:, None] * D + o_dim[None, :]
    mask = m_rank[:, None] & m_dim[None, :]
    b_k = tl.load(p_window_key + o_row, mask=mask, other=0.0)
    b_v = tl.load(p_window_value + o_row, mask=mask, other=0.0)
    if g == 0:
        o_to = ((row * HS + i_select) * N + old * K + o_rank)[:, None] * D + o_dim[None, :]
        tl.store(p_salient_key + o_to, b_k, mask=mask)
        tl.store(p_salient_value + o_to, b_v, mask=mask)
    b_logit = tl.where(m_rank, tl.sum(b_k.to(tl.float32) * b_q[None, :], 1), FAR)
    top = tl.max(b_logit, 0)
    b_p = tl.where(m_rank, tl.exp2(b_logit - top), 0.0)
    tl.store(p_acc + o_dim, tl.sum(b_p[:, None] * b_v.to(tl.float32), 0), mask=m_dim)
    tl.store(p_ml, top)
    tl.store(p_ml + 1, tl.sum(b_p, 0))


@triton.jit
def _merge(
    i_row, i_token, i_head, i_state, length, K, N, parts, epsilon, p_part_acc, p_part_ml, p_part_lin, p_part_den,
    p_part_window, p_gate, p_window_factor, p_window_score, p_output, C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BS: tl.constexpr, WP: tl.constexpr, RELEASED: tl.constexpr, GATE: tl.constexpr, FACTOR: tl.constexpr,
    OVERFLOW: tl.constexpr,
):  # fmt: skip
    """Combine the partials of one query head against their global maximum, add the linear part, store output and score.

    i_row, i_token, i_head, i_state: The head's row of the workspace, of the activations, its number, its row of the scores.
    """
    MP: tl.constexpr = 64  # more than the parts can be
    o_dim = tl.arange(0, DP)
    m_dim = o_dim < D
    b_linear = tl.load(p_part_lin + i_row * D + o_dim, mask=m_dim, other=0.0)
    den = tl.load(p_part_den + i_row)
    if GATE:
        b_linear = b_linear * tl.load(p_gate + i_token * D + o_dim, mask=m_dim, other=0.0).to(tl.float32)
    # Score of the token from the window parts.
    p_window = p_part_window + i_row * (4 * WP)
    o_window = 4 * tl.arange(0, WP)
    b_others = tl.load(p_window + o_window)
    most = tl.max(b_others, 0)
    rest = tl.sum(tl.load(p_window + o_window + 1) * tl.exp2(b_others - most), 0)
    score = (tl.load(p_window + 2) - most - tl.log2(rest)) / LOG2E
    if RELEASED:
        score = tl.load(p_window + 3)
    score = tl.where(length == 0, float("inf"), score)
    tl.store(p_window_score + i_state * (2 * C) + (length & (2 * C - 1)), score)

    # The global maximum first; then the accumulators only have to be weighted and added.
    o_all = i_row * parts + tl.arange(0, MP)
    m_all = tl.arange(0, MP) < parts
    b_all = tl.load(p_part_ml + o_all * 2, mask=m_all, other=FAR)
    top = tl.max(b_all, 0)
    total = tl.sum(tl.load(p_part_ml + o_all * 2 + 1, mask=m_all, other=0.0) * tl.exp2(b_all - top), 0)
    b_acc = tl.zeros([BS, DP], tl.float32)
    for s in range(0, parts, BS):
        m_block = s + tl.arange(0, BS) < parts
        o_block = i_row * parts + s + tl.arange(0, BS)
        b_weight = tl.exp2(tl.load(p_part_ml + o_block * 2, mask=m_block, other=FAR) - top)
        p_acc = p_part_acc + o_block[:, None] * D + o_dim[None, :]
        b_acc += tl.load(p_acc, mask=m_block[:, None] & m_dim[None, :], other=0.0) * b_weight[:, None]
    b_out = tl.sum(b_acc, 0)
    if FACTOR:
        factor = tl.load(p_window_factor + i_head)
        total = total * factor
        b_out = b_out * factor
    b_out = (b_out + b_linear) / (total + den + epsilon)
    if OVERFLOW == 0:  # beyond the capacity: the caller should have refused
        b_out = tl.where(tl.maximum(length // C - 1, 0) * K > N, float("nan"), b_out)
    tl.store(p_output + i_token * D + o_dim, b_out.to(p_output.dtype.element_ty), mask=m_dim)


@triton.jit
def _commit_token(
    p_key, p_value, p_window_key, p_window_value, row, start, length, HK, C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write the token's key and value into the ring once the promoted chunk has been read."""
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
    p_part_window,
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
    DK: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,
    KP: tl.constexpr,
    GP: tl.constexpr,
    DS: tl.constexpr,
    BN: tl.constexpr,
    BL: tl.constexpr,
    BS: tl.constexpr,
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
    """Output of one token per row (rows with new_tokens 0 get zeros). Grid (GR * (ND + WP + 1) + NS, HS, B).

    ND = D / DS slices of S, WP = 2C / BL parts of the window, one program for rows on their way into the cache. With overflow
    "error" a promotion is part of this launch; with a folding policy it has happened before (select, features, scan).
    """
    ND: tl.constexpr = DP // DS
    WP: tl.constexpr = 2 * C // BL
    JOBS: tl.constexpr = ND + WP + 1
    FUSED: tl.constexpr = OVERFLOW == 0
    i_role = tl.program_id(0)
    i_select = tl.program_id(1)
    i_batch = tl.program_id(2)
    HS = tl.num_programs(1)
    GR = H // HS
    G = H // HK
    row, start, length, count = row_of(i_batch, p_new_tokens, p_past_length, p_query_start, p_state_row, 1, RAGGED)
    i_group = i_batch.to(tl.int64) * H + i_select * GR  # first query head of the group in [B, H]
    if count == 0:
        if not RAGGED:
            if i_role < GR:
                o_dim = tl.arange(0, DP)
                b_zero = tl.zeros([DP], p_output.dtype.element_ty)
                tl.store(p_output + (i_group + i_role) * D + o_dim, b_zero, mask=o_dim < D)
        return
    i_out = start * H + i_select * GR  # the same in the packed activations
    chunk = length // C
    promoting = (length % C == 0) & (chunk >= 2)
    scale2 = scale * LOG2E
    parts = NS + WP + 1
    if i_role < GR * JOBS:
        g = i_role // JOBS
        i_job = i_role % JOBS
        i_head = i_select * GR + g
        i_kv = i_head // G
        p_q = p_query + (i_out + g) * D
        i_part = (i_group + g) * parts + NS + i_job - ND
        if i_job < ND:
            _linear_slice(
                i_job, i_head, i_select, row, length, promoting, GR, p_q, p_feature_q_weight, p_feature_k_weight,
                p_window_key, p_window_value, p_window_score, p_kv_state, p_z_state, p_part_lin + (i_group + g) * D,
                p_part_den + i_group + g, i_kv, H, HK, K, W_HEADS, C, D, DP, DK, DS, P, PP, GP, RB, FEATURE, SCOPE, FUSED,
                DOT,
            )  # fmt: skip
        elif i_job < ND + WP:
            _window_part(
                i_job - ND, i_head, row, length, p_q, p_key + (start * HK + i_kv) * D, p_value + (start * HK + i_kv) * D,
                p_window_key, p_window_value, p_part_acc + i_part * D, p_part_ml + i_part * 2,
                p_part_window + ((i_group + g) * WP + i_job - ND) * 4, i_kv, G, HK, phantom, scale2,
                (promoting == 0) | (OVERFLOW > 0), C, D, DP, BL, RELEASED,
            )  # fmt: skip
        elif FUSED and promoting:
            _fresh_part(
                chunk - 2, i_select, g, row, length, GR, HS, p_q, p_window_key, p_window_value, p_window_score,
                p_salient_key, p_salient_value, p_part_acc + i_part * D, p_part_ml + i_part * 2, i_kv, H, HK, K, N,
                scale2, C, D, DP, KP, GP, SCOPE,
            )  # fmt: skip
        else:
            o_dim = tl.arange(0, DP)
            tl.store(p_part_acc + i_part * D + o_dim, tl.zeros([DP], tl.float32), mask=o_dim < D)
            tl.store(p_part_ml + i_part * 2, FAR)
            tl.store(p_part_ml + i_part * 2 + 1, 0.0)
    else:
        i_split = i_role - GR * JOBS
        seen = tl.maximum(chunk - 1, 0) * K
        if FUSED:
            seen = tl.where(promoting, seen - K, seen)  # the newest rows are on their way
        seen = tl.minimum(seen, N)
        share = (seen + NS * BN - 1) // (NS * BN) * BN
        low = tl.minimum(i_split * share, seen)
        high = tl.minimum(low + share, seen)
        base = (row * HS + i_select) * N * D
        i_part = i_group * parts + i_split
        if SCOPE == 0:
            _salient_one(
                p_salient_key + base, p_salient_value + base, p_query + i_out * D, low, high, scale2,
                p_part_acc + i_part * D, p_part_ml + i_part * 2, D, DP, BN,
            )  # fmt: skip
        else:
            _salient_group(
                p_salient_key + base, p_salient_value + base, p_query, i_out, GR, low, high, scale2, p_part_acc,
                p_part_ml, i_part, parts, D, DP, BN, GP, DOT,
            )  # fmt: skip

    tl.debug_barrier()
    p_counter = p_counters + i_batch * (2 * H) + i_select
    if tl.atomic_add(p_counter, 1, sem="acq_rel") != GR * JOBS + NS - 1:
        return
    tl.store(p_counter, 0)
    for g in range(GR):
        _merge(
            i_group + g, i_out + g, i_select * GR + g, row * H + i_select * GR + g, length, K, N, parts, epsilon,
            p_part_acc, p_part_ml, p_part_lin, p_part_den, p_part_window, p_gate, p_window_factor, p_window_score,
            p_output, C, D, DP, BS, WP, RELEASED, GATE, FACTOR, OVERFLOW,
        )  # fmt: skip
    if FUSED:
        if promoting:
            tl.debug_barrier()
            p_counter = p_counters + i_batch * (2 * H) + H
            if tl.atomic_add(p_counter, 1, sem="acq_rel") == HS - 1:
                tl.store(p_counter, 0)
                _commit_token(p_key, p_value, p_window_key, p_window_value, row, start, length, HK, C, D)
