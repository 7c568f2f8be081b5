"""Device functions shared by the Triton kernels of hybrid attention.

Conventions of all kernels: a call has new tokens at positions length .. length + count - 1 of each row; `position` is
absolute; the window ring has position p in slot p mod 2C. Every state is updated in place. Masked loads return zeros.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import LOG2E, as_numbers

FEATURE_CODES = {"np_softmax_pm": 0, "softmax_pm": 1, "softmax": 2, "relu": 3, "elu_plus_one": 4, "identity": 5}
SCOPE_CODES = {"q_head": 0, "kv_group_max": 1, "kv_group_mean": 2}

FEATURE_FLOOR = tl.constexpr(1e-12)
RELEASED_EPSILON = tl.constexpr(1e-8)


@triton.jit
def load_tokens(
    p_new, p_ring, p_ring_scale, o_position, length, end, stride, o_dim, D: tl.constexpr, C: tl.constexpr, CODES: tl.constexpr
):  # fmt: skip
    """Columns `o_dim` of a key or value head at absolute positions, from the call's tokens or the ring; zeros elsewhere.

    p_new: the head's row of the call's first token, `stride` elements between tokens. p_ring, p_ring_scale: the head's ring.
    """
    m_new = (o_position >= length) & (o_position < end)
    m_old = (o_position >= 0) & (o_position < length) & (o_position >= length - 2 * C)
    o_new = (o_position - length).to(tl.int64) * stride
    o_slot = o_position & (2 * C - 1)
    o_old = o_slot.to(tl.int64) * D
    m_dim = (o_dim < D)[None, :]
    if CODES:
        b_new = tl.load((p_new + o_new)[:, None] + o_dim[None, :], mask=m_new[:, None] & m_dim, other=0.0)
        b_old = tl.load((p_ring + o_old)[:, None] + o_dim[None, :], mask=m_old[:, None] & m_dim, other=0)
        b_rows = tl.where(m_new[:, None], b_new, as_numbers(b_old, p_ring_scale, o_slot, m_old, b_new.dtype, CODES))
    else:
        p_row = tl.where(m_new, p_new + o_new, p_ring + o_old)
        b_rows = tl.load(p_row[:, None] + o_dim[None, :], mask=(m_new | m_old)[:, None] & m_dim, other=0.0)
    return b_rows


@triton.jit
def load_weight(p_weight, o_row, o_dim, P: tl.constexpr, D: tl.constexpr):
    """Rows `o_row`, columns `o_dim` of one head's projection."""
    mask = (o_row < P)[:, None] & (o_dim < D)[None, :]
    return tl.load(p_weight + o_row[:, None] * D + o_dim[None, :], mask=mask, other=0.0)


@triton.jit
def direction_scale(b_norm_square, b_square, FEATURE: tl.constexpr):
    """What multiplies a projection before its exponential in base 2, from squared norms of projection and input."""
    b_scale = tl.full(b_square.shape, LOG2E, tl.float32)
    if FEATURE == 0:
        b_scale = LOG2E * tl.sqrt(b_square) / tl.maximum(tl.sqrt(b_norm_square), FEATURE_FLOOR)
    return b_scale


@triton.jit
def plain_features(b_direction, FEATURE: tl.constexpr):
    """Features of the maps without normalisation."""
    if FEATURE == 5:
        return b_direction
    if FEATURE == 4:
        b_phi = tl.where(b_direction > 0, b_direction + 1.0, tl.exp2(b_direction * LOG2E))
    else:
        b_phi = b_direction
    return tl.maximum(b_phi, FEATURE_FLOOR)


@triton.jit
def scaled_softmax(b_x, b_scale, b_keep, m_feature, P: tl.constexpr, PP: tl.constexpr):
    """Softmax of rows times a scale >= 0, in base 2, with the floor of the features; times b_keep, 0 or 1 by row.

    Scale and maximum enter one multiply-add; b_keep enters the rows' factors.
    """
    if P != PP:
        b_x = tl.where(m_feature[None, :], b_x, float("-inf"))
    b_top = tl.max(b_x, 1) * b_scale
    b_e = tl.exp2(b_x * b_scale[:, None] - b_top[:, None])
    if P != PP:
        b_e = tl.where(m_feature[None, :], b_e, 0.0)  # where the scale is 0
    b_phi = tl.maximum(b_e * (b_keep / tl.sum(b_e, 1))[:, None], (b_keep * FEATURE_FLOOR)[:, None])
    if P != PP:
        b_phi = tl.where(m_feature[None, :], b_phi, 0.0)
    return b_phi


@triton.jit
def kept_features(b_direction, b_square, b_keep, P: tl.constexpr, PP: tl.constexpr, FEATURE: tl.constexpr):
    """Features of rows in two halves [M, PP], 0 beyond P; the second is 0 for maps without one.

    b_direction: Projections [M, PP], 0 beyond P. b_square: Squared norms of the inputs, [M]. b_keep: 1, or 0 for rows of zeros.
    """
    m_feature = tl.arange(0, PP) < P
    b_minus = tl.zeros(b_direction.shape, tl.float32)
    if FEATURE <= 2:
        b_scale = direction_scale(tl.sum(b_direction * b_direction, 1), b_square, FEATURE)
        b_plus = scaled_softmax(b_direction, b_scale, b_keep, m_feature, P, PP)
        if FEATURE <= 1:
            b_minus = scaled_softmax(-b_direction, b_scale, b_keep, m_feature, P, PP)
    else:
        b_plus = tl.where(m_feature[None, :], plain_features(b_direction, FEATURE) * b_keep[:, None], 0.0)
    return b_plus, b_minus


@triton.jit
def feature_pair(b_direction, b_square, P: tl.constexpr, PP: tl.constexpr, FEATURE: tl.constexpr):
    """`kept_features` of all rows."""
    b_all = tl.full(b_square.shape, 1.0, tl.float32)
    b_plus, b_minus = kept_features(b_direction, b_square, b_all, P, PP, FEATURE)
    return b_plus, b_minus


@triton.jit
def ranked_scores(
    p_score, p_window_score,
    o_position, length, end, start, row, i_select, H, GR,
    SCOPE: tl.constexpr, GP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Scores that the selection ranks, of one select head at absolute positions; GR <= GP query heads per select head."""
    m_new = (o_position >= length) & (o_position < end)
    m_old = (o_position >= 0) & (o_position < length)
    o_slot = o_position & (2 * C - 1)
    if SCOPE == 0:
        b_new = tl.load(p_score + (start + o_position - length) * H + i_select, mask=m_new, other=0.0)
        b_old = tl.load(p_window_score + (row * H + i_select) * (2 * C) + o_slot, mask=m_old, other=0.0)
        return tl.where(m_new, b_new, b_old)
    o_group = tl.arange(0, GP)[:, None]
    i_head = i_select * GR + o_group
    m_group = o_group < GR
    p_new = p_score + (start + o_position - length)[None, :] * H + i_head
    p_old = p_window_score + (row * H + i_head) * (2 * C) + o_slot[None, :]
    b_new = tl.load(p_new, mask=m_group & m_new[None, :], other=0.0)
    b_old = tl.load(p_old, mask=m_group & m_old[None, :], other=0.0)
    b_score = tl.where(m_new[None, :], b_new, b_old)
    if SCOPE == 1:
        return tl.max(tl.where(m_group, b_score, float("-inf")), 0)
    return tl.sum(b_score, 0) / GR


@triton.jit
def select_chunk(
    p_score, p_window_score,
    chunk, length, end, start, row, i_select, H, GR, K,
    SCOPE: tl.constexpr, GP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """True for the K highest scores of a chunk (ties: lower position), int1 [C]."""
    o_row = tl.arange(0, C)
    b_score = ranked_scores(
        p_score, p_window_score, chunk * C + o_row, length, end, start, row, i_select, H, GR, SCOPE, GP, C
    )
    # Scores as integers of the same order, behind them the place: one maximum finds the next token, and no two are equal.
    b_bits = tl.where(b_score == 0, 0.0, b_score).to(tl.int32, bitcast=True)
    b_key = ((b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (C - 1 - o_row)
    b_selected = o_row < 0
    for _ in range(K):
        b_left = tl.where(b_selected, -(1 << 63), b_key)
        b_selected = b_selected | (b_left == tl.max(b_left, 0))
    return b_selected


@triton.jit
def selected_offsets(b_selected, KP: tl.constexpr, C: tl.constexpr):
    """Offsets in the chunk of its selected tokens, ascending, [KP]; entries past their number are 0."""
    o_row = tl.arange(0, C)
    b_turn = tl.cumsum(b_selected.to(tl.int32), 0) - 1
    o_rank = tl.arange(0, KP)
    b_hit = b_selected[None, :] & (b_turn[None, :] == o_rank[:, None])
    return tl.sum(tl.where(b_hit, o_row[None, :], 0), 1)
