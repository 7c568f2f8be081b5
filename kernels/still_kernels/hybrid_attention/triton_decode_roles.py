"""What the programs of the decode kernel compute before they meet: cache splits, slices of S, parts of the window."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.hybrid_attention.triton_common import (
    FEATURE_FLOOR,
    RELEASED_EPSILON,
    direction_scale,
    feature_pair,
    load_weight,
    plain_features,
    select_chunk,
    selected_offsets,
)

FAR = tl.constexpr(-1.0e30)  # below every logit, and finite: differences stay numbers


@triton.jit
def salient_one(
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
def salient_group(
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
def linear_slice(
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
def window_part(
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
def fresh_part(
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
