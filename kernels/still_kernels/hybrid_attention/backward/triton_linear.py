"""Backward pass, linear part: features, states of each chunk, and gradients through both.

Rows are new and equally long. `late` chunks are promoted, chunk c for the queries of chunk c + 2 and later. States and their
gradients are stored for each promoted chunk, [B, H, late, F, D] and [B, H, late, F].
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import LOG2E
from still_kernels.hybrid_attention.backward.triton_softmax import load_rows, store_rows
from still_kernels.hybrid_attention.triton_common import FEATURE_FLOOR, kept_features, load_weight


@triton.jit(do_not_specialize=["T", "H", "HX", "W_HEADS", "HS", "n_flags", "first", "last"])
def backward_features_kernel(
    p_x, p_weight, p_folds, p_phi,
    T, H, HX, W_HEADS, HS, n_flags, first, last,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, F: tl.constexpr,
    FEATURE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Features phi [B, H, T, F] of chunks first .. last - 1 of x [B, T, HX, D]. Grid (last - first, H, B).

    p_folds: Where given, as of gather_kernel: tokens that stay in softmax have features of 0.
    """
    i_chunk = first + tl.program_id(0)
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    o_row = tl.arange(0, C)
    o_token = i_chunk * C + o_row
    o_dim = tl.arange(0, DP)
    o_feature = tl.arange(0, PP)
    b_x = load_rows(p_x, i_batch, T, HX, i_head // (H // HX), o_token, o_dim, D)
    b_weight = load_weight(p_weight + (i_head % W_HEADS).to(tl.int64) * (P * D), o_feature, o_dim, P, D)
    b_direction = tl.dot(b_x, tl.trans(b_weight), input_precision=DOT)
    b_wide = b_x.to(tl.float32)
    b_keep = tl.full([C], 1.0, tl.float32)
    if p_folds is not None:
        i_flags = (i_batch.to(tl.int64) * n_flags + i_chunk + 2) * HS + i_head // (H // HS)
        b_keep = tl.load(p_folds + i_flags * C + o_row).to(tl.float32)
    b_plus, b_minus = kept_features(b_direction, tl.sum(b_wide * b_wide, 1), b_keep, P, PP, FEATURE)
    i_row = (i_batch.to(tl.int64) * H + i_head) * T + o_token
    p_row = p_phi + i_row[:, None] * F + o_feature[None, :]
    mask = (o_token < T)[:, None] & (o_feature < P)[None, :]
    tl.store(p_row, b_plus.to(p_phi.dtype.element_ty), mask=mask)
    if FEATURE <= 1:
        tl.store(p_row + P, b_minus.to(p_phi.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "H", "HK", "late"])
def backward_scan_kernel(
    p_value, p_phi_k, p_prefix_kv, p_prefix_z,
    T, H, HK, late,
    C: tl.constexpr, D: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, DB: tl.constexpr, STAGES: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """States after each promoted chunk. Grid (ceil(F / FB) * ceil(D / DB), H, B)."""
    parts = (D + DB - 1) // DB
    o_feature = (tl.program_id(0) // parts) * FB + tl.arange(0, FB)
    o_dim = (tl.program_id(0) % parts) * DB + tl.arange(0, DB)
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    o_row = tl.arange(0, C)
    m_feature = o_feature < F
    i_rows = i_batch.to(tl.int64) * H + i_head
    b_state = tl.zeros([FB, DB], tl.float32)
    b_mass = tl.zeros([FB], tl.float32)
    for chunk in tl.range(0, late, num_stages=STAGES):
        o_token = chunk * C + o_row
        p_phi = p_phi_k + (i_rows * T + o_token)[:, None] * F + o_feature[None, :]
        b_phi = tl.load(p_phi, mask=m_feature[None, :], other=0.0)
        b_value = load_rows(p_value, i_batch, T, HK, i_head // (H // HK), o_token, o_dim, D)
        b_state = tl.dot(tl.trans(b_phi), b_value.to(b_phi.dtype), b_state, input_precision=DOT)
        b_mass += tl.sum(b_phi.to(tl.float32), 0)
        o_state = (i_rows * late + chunk) * F + o_feature
        mask = m_feature[:, None] & (o_dim < D)[None, :]
        p_state = p_prefix_kv + o_state[:, None] * D + o_dim[None, :]
        tl.store(p_state, b_state.to(p_prefix_kv.dtype.element_ty), mask=mask)
        tl.store(p_prefix_z + o_state, b_mass, mask=m_feature)


@triton.jit
def _linear_grad(p_grad, p_gate, b_inverse, i_batch, T, H, i_head, o_token, o_dim, D: tl.constexpr, GATE: tl.constexpr):
    """Gradient of the linear terms of queries, before their gate where GATE is 0."""
    b_grad = load_rows(p_grad, i_batch, T, H, i_head, o_token, o_dim, D).to(tl.float32) * b_inverse[:, None]
    if GATE:
        b_grad *= load_rows(p_gate, i_batch, T, H, i_head, o_token, o_dim, D).to(tl.float32)
    return b_grad


@triton.jit(do_not_specialize=["T", "H", "late"])
def backward_reverse_kernel(
    p_grad, p_gate, p_phi_q, p_inverse, p_delta, p_grad_kv, p_grad_z,
    T, H, late,
    C: tl.constexpr, D: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, DB: tl.constexpr, STAGES: tl.constexpr,
    GATE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Gradients of what each promoted chunk adds to the states, from the last chunk to the first. Grid as of backward_scan_kernel."""
    parts = (D + DB - 1) // DB
    o_feature = (tl.program_id(0) // parts) * FB + tl.arange(0, FB)
    o_dim = (tl.program_id(0) % parts) * DB + tl.arange(0, DB)
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    o_row = tl.arange(0, C)
    m_feature = o_feature < F
    i_rows = i_batch.to(tl.int64) * H + i_head
    b_state = tl.zeros([FB, DB], tl.float32)
    b_mass = tl.zeros([FB], tl.float32)
    for turn in tl.range(0, late, num_stages=STAGES):
        chunk = late - 1 - turn
        o_token = (chunk + 2) * C + o_row
        m_token = o_token < T
        i_token = i_rows * T + o_token
        mask = m_token[:, None] & m_feature[None, :]
        b_phi = tl.load(p_phi_q + i_token[:, None] * F + o_feature[None, :], mask=mask, other=0.0)
        b_inverse = tl.load(p_inverse + i_token, mask=m_token, other=0.0)
        b_delta = tl.load(p_delta + i_token, mask=m_token, other=0.0)
        b_linear = _linear_grad(p_grad, p_gate, b_inverse, i_batch, T, H, i_head, o_token, o_dim, D, GATE)
        b_state = tl.dot(tl.trans(b_phi), b_linear.to(b_phi.dtype), b_state, input_precision=DOT)
        b_mass -= tl.sum(b_phi.to(tl.float32) * (b_inverse * b_delta)[:, None], 0)
        o_state = (i_rows * late + chunk) * F + o_feature
        m_state = m_feature[:, None] & (o_dim < D)[None, :]
        p_state = p_grad_kv + o_state[:, None] * D + o_dim[None, :]
        tl.store(p_state, b_state.to(p_grad_kv.dtype.element_ty), mask=m_state)
        tl.store(p_grad_z + o_state, b_mass, mask=m_feature)


@triton.jit
def _load_half(p_state, o_feature, o_dim, P: tl.constexpr, D: tl.constexpr):
    """Half of a state, [PP, DP]."""
    mask = (o_feature < P)[:, None] & (o_dim < D)[None, :]
    return tl.load(p_state + o_feature[:, None] * D + o_dim[None, :], mask=mask, other=0.0)


@triton.jit
def _through_features(
    b_x, b_weight, b_direction, b_square, b_plus, b_minus, b_grad_plus, b_grad_minus, b_keep, FEATURE: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """From the gradients of features to those of projections [M, PP] and of inputs [M, DP], whose weight was in the way."""
    b_more = tl.zeros(b_square.shape, tl.float32)
    if FEATURE <= 2:
        b_grad = b_plus * (b_grad_plus - tl.sum(b_plus * b_grad_plus, 1)[:, None])
        if FEATURE <= 1:
            b_grad -= b_minus * (b_grad_minus - tl.sum(b_minus * b_grad_minus, 1)[:, None])
        if FEATURE == 0:  # the direction has the norm of the input
            b_norm = tl.sqrt(tl.sum(b_direction * b_direction, 1))
            b_floored = tl.maximum(b_norm, FEATURE_FLOOR)
            b_length = tl.sqrt(b_square)
            b_along = tl.sum(b_grad * b_direction, 1)
            b_bent = tl.where(b_norm > FEATURE_FLOOR, b_along / (b_floored * b_floored), 0.0)
            b_grad = (b_length / b_floored)[:, None] * (b_grad - b_direction * b_bent[:, None])
            b_more = tl.where(b_length > 0, b_along / (b_floored * tl.where(b_length > 0, b_length, 1.0)), 0.0)
    else:
        b_grad = b_grad_plus * b_keep[:, None]
        if FEATURE == 4:
            b_slope = tl.where(b_direction > 0, 1.0, tl.exp2(tl.minimum(b_direction, 0.0) * LOG2E))
            b_grad *= tl.where(b_slope >= FEATURE_FLOOR, b_slope, 0.0)
        if FEATURE == 3:
            b_grad = tl.where(b_direction >= FEATURE_FLOOR, b_grad, 0.0)
    b_input = tl.dot(b_grad.to(b_weight.dtype), b_weight, input_precision=DOT) + b_more[:, None] * b_x.to(tl.float32)
    return b_grad, b_input


@triton.jit(do_not_specialize=["T", "H", "W_HEADS", "late"])
def backward_linear_query_kernel(
    p_query, p_gate, p_grad, p_weight, p_inverse, p_delta, p_prefix_kv, p_prefix_z, p_grad_query, p_grad_gate, p_grad_weight,
    T, H, W_HEADS, late,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, F: tl.constexpr, BM: tl.constexpr,
    TB: tl.constexpr, FEATURE: tl.constexpr, GATE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Gradients of queries (added to grad_query), gates and of the queries' projection through the linear terms.

    TB blocks of BM queries of chunks 2 and later a program, whose part of the projection's gradient is one of grad_weight
    [B, programs, H, P, D]. BM divides C. Grid (ceil(late * C / (BM * TB)), H, B).
    """
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    o_dim = tl.arange(0, DP)
    o_feature = tl.arange(0, PP)
    i_rows = i_batch.to(tl.int64) * H + i_head
    b_weight = load_weight(p_weight + (i_head % W_HEADS).to(tl.int64) * (P * D), o_feature, o_dim, P, D)
    b_grad_weight = tl.zeros([PP, DP], tl.float32)
    begin = 2 * C + tl.program_id(0) * (BM * TB)
    for first in range(begin, tl.minimum(begin + BM * TB, T), BM):
        o_token = first + tl.arange(0, BM)
        m_token = o_token < T
        b_x = load_rows(p_query, i_batch, T, H, i_head, o_token, o_dim, D)
        b_inverse = tl.load(p_inverse + i_rows * T + o_token, mask=m_token, other=0.0)
        b_delta = tl.load(p_delta + i_rows * T + o_token, mask=m_token, other=0.0)
        b_wide = b_x.to(tl.float32)
        b_square = tl.sum(b_wide * b_wide, 1)
        b_direction = tl.dot(b_x, tl.trans(b_weight), input_precision=DOT)
        b_keep = tl.full([BM], 1.0, tl.float32)
        b_plus, b_minus = kept_features(b_direction, b_square, b_keep, P, PP, FEATURE)
        o_state = (i_rows * late + first // C - 2) * F
        p_state = p_prefix_kv + o_state * D
        b_state = _load_half(p_state, o_feature, o_dim, P, D)
        b_linear = _linear_grad(p_grad, p_gate, b_inverse, i_batch, T, H, i_head, o_token, o_dim, D, GATE)
        b_linear = b_linear.to(b_state.dtype)
        b_mass = -b_inverse * b_delta
        b_z = tl.load(p_prefix_z + o_state + o_feature, mask=o_feature < P, other=0.0)
        b_grad_plus = tl.dot(b_linear, tl.trans(b_state), input_precision=DOT) + b_mass[:, None] * b_z[None, :]
        if GATE:
            b_read = tl.dot(b_plus.to(b_state.dtype), b_state, input_precision=DOT)
        b_grad_minus = b_grad_plus
        if FEATURE <= 1:
            b_state = _load_half(p_state + P * D, o_feature, o_dim, P, D)
            b_z = tl.load(p_prefix_z + o_state + P + o_feature, mask=o_feature < P, other=0.0)
            b_grad_minus = tl.dot(b_linear, tl.trans(b_state), input_precision=DOT) + b_mass[:, None] * b_z[None, :]
            if GATE:
                b_read = tl.dot(b_minus.to(b_state.dtype), b_state, b_read, input_precision=DOT)
        if GATE:
            b_read *= _linear_grad(p_grad, p_gate, b_inverse, i_batch, T, H, i_head, o_token, o_dim, D, 0)
            store_rows(p_grad_gate, b_read, i_batch, T, H, i_head, o_token, o_dim, D)
        b_projected, b_input = _through_features(
            b_x, b_weight, b_direction, b_square, b_plus, b_minus, b_grad_plus, b_grad_minus, b_keep, FEATURE, DOT
        )
        b_grad_weight = tl.dot(tl.trans(b_projected.to(b_x.dtype)), b_x, b_grad_weight, input_precision=DOT)
        b_input += load_rows(p_grad_query, i_batch, T, H, i_head, o_token, o_dim, D).to(tl.float32)
        store_rows(p_grad_query, b_input, i_batch, T, H, i_head, o_token, o_dim, D)
    i_part = (i_batch.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * H + i_head
    mask = (o_feature < P)[:, None] & (o_dim < D)[None, :]
    tl.store(p_grad_weight + i_part * (P * D) + o_feature[:, None] * D + o_dim[None, :], b_grad_weight, mask=mask)


@triton.jit(do_not_specialize=["T", "H", "HK", "HS", "W_HEADS", "late", "n_flags"])
def backward_linear_key_kernel(
    p_key, p_value, p_weight, p_folds, p_grad_kv, p_grad_z, p_linear_grad_key, p_linear_grad_value, p_grad_weight,
    T, H, HK, HS, W_HEADS, late, n_flags,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, F: tl.constexpr, BM: tl.constexpr,
    TB: tl.constexpr, FEATURE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values [B, late * C, H, D], and of the keys' projection, through the linear terms.

    Blocks, grid and grad_weight as of backward_linear_query_kernel, from chunk 0 on.
    """
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    i_kv = i_head // (H // HK)
    o_row = tl.arange(0, BM)
    o_dim = tl.arange(0, DP)
    o_feature = tl.arange(0, PP)
    i_rows = i_batch.to(tl.int64) * H + i_head
    b_weight = load_weight(p_weight + (i_head % W_HEADS).to(tl.int64) * (P * D), o_feature, o_dim, P, D)
    b_grad_weight = tl.zeros([PP, DP], tl.float32)
    begin = tl.program_id(0) * (BM * TB)
    for first in range(begin, tl.minimum(begin + BM * TB, late * C), BM):
        chunk = first // C
        o_token = first + o_row
        b_x = load_rows(p_key, i_batch, T, HK, i_kv, o_token, o_dim, D)
        b_value = load_rows(p_value, i_batch, T, HK, i_kv, o_token, o_dim, D)
        i_flags = (i_batch.to(tl.int64) * n_flags + chunk + 2) * HS + i_head // (H // HS)
        b_keep = tl.load(p_folds + i_flags * C + first % C + o_row).to(tl.float32)
        b_wide = b_x.to(tl.float32)
        b_square = tl.sum(b_wide * b_wide, 1)
        b_direction = tl.dot(b_x, tl.trans(b_weight), input_precision=DOT)
        b_plus, b_minus = kept_features(b_direction, b_square, b_keep, P, PP, FEATURE)
        o_state = (i_rows * late + chunk) * F
        b_state = _load_half(p_grad_kv + o_state * D, o_feature, o_dim, P, D)
        b_z = tl.load(p_grad_z + o_state + o_feature, mask=o_feature < P, other=0.0)
        b_grad_plus = tl.dot(b_value.to(b_state.dtype), tl.trans(b_state), input_precision=DOT) + b_z[None, :]
        b_dv = tl.dot(b_plus.to(b_state.dtype), b_state, input_precision=DOT)
        b_grad_minus = b_grad_plus
        if FEATURE <= 1:
            b_state = _load_half(p_grad_kv + (o_state + P) * D, o_feature, o_dim, P, D)
            b_z = tl.load(p_grad_z + o_state + P + o_feature, mask=o_feature < P, other=0.0)
            b_grad_minus = tl.dot(b_value.to(b_state.dtype), tl.trans(b_state), input_precision=DOT) + b_z[None, :]
            b_dv = tl.dot(b_minus.to(b_state.dtype), b_state, b_dv, input_precision=DOT)
        b_projected, b_input = _through_features(
            b_x, b_weight, b_direction, b_square, b_plus, b_minus, b_grad_plus, b_grad_minus, b_keep, FEATURE, DOT
        )
        b_grad_weight = tl.dot(tl.trans(b_projected.to(b_x.dtype)), b_x, b_grad_weight, input_precision=DOT)
        store_rows(p_linear_grad_key, b_input, i_batch, late * C, H, i_head, o_token, o_dim, D)
        store_rows(p_linear_grad_value, b_dv, i_batch, late * C, H, i_head, o_token, o_dim, D)
    i_part = (i_batch.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * H + i_head
    mask = (o_feature < P)[:, None] & (o_dim < D)[None, :]
    tl.store(p_grad_weight + i_part * (P * D) + o_feature[:, None] * D + o_dim[None, :], b_grad_weight, mask=mask)
