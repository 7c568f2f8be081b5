"""Backward pass, softmax part: gradients of queries, then those of keys and values, of the window and of the salient tokens.

Rows are new and equally long. Tensors of tokens are [B, T, heads, D]; numbers of each query [B, H, T]. `lse` is the base-2 logarithm of the
divisor of a query's exponentials, including the linear terms' share: exp2(logit2 - lse) is the weight of a key before the window factor.
The row's maximum is a constant of the op, as in the forward pass.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import LOG2E

TINY = tl.constexpr(-1.0e30)


@triton.jit
def load_rows(p_x, i_batch, T, heads, i_head, o_token, o_dim, D: tl.constexpr):
    """Rows of one head of [B, T, heads, D], zeros beyond T and D."""
    o_row = ((i_batch.to(tl.int64) * T + o_token) * heads + i_head) * D
    return tl.load(p_x + o_row[:, None] + o_dim[None, :], mask=(o_token < T)[:, None] & (o_dim < D)[None, :], other=0.0)


@triton.jit
def store_rows(p_x, b_x, i_batch, T, heads, i_head, o_token, o_dim, D: tl.constexpr):
    """The way back; nothing beyond T and D."""
    o_row = ((i_batch.to(tl.int64) * T + o_token) * heads + i_head) * D
    mask = (o_token < T)[:, None] & (o_dim < D)[None, :]
    tl.store(p_x + o_row[:, None] + o_dim[None, :], b_x.to(p_x.dtype.element_ty), mask=mask)


@triton.jit
def kept_turn(p_kept, o_row):
    """Of a chunk's tokens: whether each stays in softmax, and its place among those that do."""
    m_kept = tl.load(p_kept + o_row) == 0
    return m_kept, tl.cumsum(m_kept.to(tl.int32), 0) - 1


@triton.jit(do_not_specialize=["T", "HK", "GS", "K"])
def gather_kernel(
    p_key, p_value, p_folds, p_salient_key, p_salient_value,
    T, HK, GS, K, n_flags,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Keys and values that stay in softmax, salient_* [B, HS, chunks * K, D]. Grid (promoted chunks, HS, B).

    p_folds: 0 where a token stays, [B, n_flags, HS, C], those of chunk c at c + 2. GS: select heads of a key head.
    """
    i_chunk = tl.program_id(0)
    i_select = tl.program_id(1)
    HS = tl.num_programs(1)
    i_batch = tl.program_id(2)
    o_row = tl.arange(0, C)
    o_dim = tl.arange(0, DP)
    p_flags = p_folds + ((i_batch.to(tl.int64) * n_flags + i_chunk + 2) * HS + i_select) * C
    m_kept, o_turn = kept_turn(p_flags, o_row)
    o_slot = (i_batch.to(tl.int64) * HS + i_select) * (tl.num_programs(0) * K) + i_chunk * K + o_turn
    mask = m_kept[:, None] & (o_dim < D)[None, :]
    p_to = o_slot[:, None] * D + o_dim[None, :]
    i_kv = i_select // GS
    b_key = load_rows(p_key, i_batch, T, HK, i_kv, i_chunk * C + o_row, o_dim, D)
    tl.store(p_salient_key + p_to, b_key, mask=mask)
    b_value = load_rows(p_value, i_batch, T, HK, i_kv, i_chunk * C + o_row, o_dim, D)
    tl.store(p_salient_value + p_to, b_value, mask=mask)


@triton.jit
def _running(b_max, b_sum, b_dot, scale2):
    """Maximum and sum of exponentials after a block of dot products, -inf where nothing is seen."""
    b_new = tl.maximum(b_max, tl.max(b_dot, 1) * scale2)
    b_sum = b_sum * tl.exp2(b_max - b_new) + tl.sum(tl.exp2(b_dot * scale2 - b_new[:, None]), 1)
    return b_new, b_sum


@triton.jit
def _towards_query(b_dot, b_grad, b_key, b_value, b_lse, b_delta, b_dq, b_row, scale2, DOT: tl.constexpr):
    """A block of keys into the gradient of the queries (without scale and factor) and into each row's sum of those of its logits."""
    b_p = tl.exp2(b_dot * scale2 - b_lse[:, None])
    b_ds = b_p * (tl.dot(b_grad, tl.trans(b_value), input_precision=DOT) - b_delta[:, None])
    return tl.dot(b_ds.to(b_key.dtype), b_key, b_dq, input_precision=DOT), b_row + tl.sum(b_ds, 1)


@triton.jit(do_not_specialize=["T", "H", "HK", "HS", "K", "N", "phantom"])
def backward_query_kernel(
    p_query, p_key, p_value, p_output, p_grad, p_window_factor, p_salient_key, p_salient_value, p_phi_q, p_prefix_z,
    p_grad_query, p_lse, p_inverse, p_delta, p_grad_factor,
    T, H, HK, HS, K, N, phantom, scale, epsilon,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, FACTOR: tl.constexpr, TOWARDS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Gradient of the queries through the softmax terms, and what the kernels after it need of each query.

    First pass: maximum and sum of the row, hence lse, inverse = 1 / denominator and delta = grad . output. Second pass, where TOWARDS: the
    gradient, and grad_factor, the row's sum of the gradients of its logits before the factor. BM divides C.
    Grid (ceil(T / BM), H, B), the longest programs first.
    """
    i_block = tl.num_programs(0) - 1 - tl.program_id(0)
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    i_kv = i_head // (H // HK)
    first = i_block * BM
    chunk = first // C
    o_query = first + tl.arange(0, BM)
    o_dim = tl.arange(0, DP)
    o_slot = tl.arange(0, BN)
    m_dim = (o_dim < D)[None, :]
    b_q = load_rows(p_query, i_batch, T, H, i_head, o_query, o_dim, D)
    b_grad = load_rows(p_grad, i_batch, T, H, i_head, o_query, o_dim, D)
    b_output = load_rows(p_output, i_batch, T, H, i_head, o_query, o_dim, D)
    b_delta = tl.sum(b_grad.to(tl.float32) * b_output.to(tl.float32), 1)
    scale2 = scale * LOG2E
    begin = tl.maximum(chunk - 1, 0) * C
    stop = tl.minimum(first + BM, T)
    seen = tl.minimum(tl.maximum(chunk - 1, 0) * K, N)
    whole = seen // BN * BN
    i_cache = (i_batch.to(tl.int64) * HS + i_head // (H // HS)) * N
    p_cached_key = p_salient_key + i_cache * D + o_dim[None, :]
    p_cached_value = p_salient_value + i_cache * D + o_dim[None, :]

    b_max = tl.full([BM], TINY, tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    for o_first in tl.range(begin, stop, BN, num_stages=STAGES):
        o_key = o_first + o_slot
        b_key = load_rows(p_key, i_batch, T, HK, i_kv, o_key, o_dim, D)
        b_dot = tl.dot(b_q, tl.trans(b_key), input_precision=DOT)
        b_dot = tl.where(o_key[None, :] <= o_query[:, None], b_dot, float("-inf"))
        b_max, b_sum = _running(b_max, b_sum, b_dot, scale2)
    for s in tl.range(0, whole, BN, num_stages=STAGES):
        b_key = tl.load(p_cached_key + (s + o_slot)[:, None] * D, mask=m_dim, other=0.0)
        b_max, b_sum = _running(b_max, b_sum, tl.dot(b_q, tl.trans(b_key), input_precision=DOT), scale2)
    if whole < seen:
        m_slot = whole + o_slot < seen
        b_key = tl.load(p_cached_key + (whole + o_slot)[:, None] * D, mask=m_slot[:, None] & m_dim, other=0.0)
        b_dot = tl.dot(b_q, tl.trans(b_key), input_precision=DOT)
        b_max, b_sum = _running(b_max, b_sum, tl.where(m_slot[None, :], b_dot, float("-inf")), scale2)
    hidden = tl.where((phantom != 0) & (chunk == 0), 1.0 * C, 0.0)  # logits of 0 with zero keys and values
    if hidden > 0:
        b_new = tl.maximum(b_max, 0.0)
        b_sum = b_sum * tl.exp2(b_max - b_new) + hidden * tl.exp2(-b_new)
        b_max = b_new

    b_denominator = b_sum
    if FACTOR:
        b_denominator *= tl.load(p_window_factor + i_head)
    b_linear = tl.zeros([BM], tl.float32)
    if chunk >= 2:
        o_feature = tl.arange(0, FP)
        i_row = (i_batch.to(tl.int64) * H + i_head) * T + o_query
        mask = (o_query < T)[:, None] & (o_feature < F)[None, :]
        b_phi = tl.load(p_phi_q + i_row[:, None] * F + o_feature[None, :], mask=mask, other=0.0).to(tl.float32)
        late = (T + C - 1) // C - 2
        p_z = p_prefix_z + ((i_batch.to(tl.int64) * H + i_head) * late + chunk - 2) * F
        b_z = tl.load(p_z + o_feature, mask=o_feature < F, other=0.0)
        b_linear = tl.sum(b_phi * b_z[None, :], 1)
    b_denominator += b_linear + epsilon
    b_lse = b_max + tl.log2(b_denominator)

    o_number = (i_batch.to(tl.int64) * H + i_head) * T + o_query
    m_query = o_query < T
    tl.store(p_lse + o_number, b_lse, mask=m_query)
    tl.store(p_inverse + o_number, 1.0 / b_denominator, mask=m_query)
    tl.store(p_delta + o_number, b_delta, mask=m_query)
    if TOWARDS:
        b_dq = tl.zeros([BM, DP], tl.float32)
        b_row = tl.zeros([BM], tl.float32)
        if hidden > 0:  # else logits may all lie so far below 0 that the exponential is infinite
            b_row = -hidden * tl.exp2(-b_lse) * b_delta
        for o_first in tl.range(begin, stop, BN, num_stages=STAGES):
            o_key = o_first + o_slot
            b_key = load_rows(p_key, i_batch, T, HK, i_kv, o_key, o_dim, D)
            b_value = load_rows(p_value, i_batch, T, HK, i_kv, o_key, o_dim, D)
            b_dot = tl.dot(b_q, tl.trans(b_key), input_precision=DOT)
            b_dot = tl.where(o_key[None, :] <= o_query[:, None], b_dot, float("-inf"))
            b_dq, b_row = _towards_query(b_dot, b_grad, b_key, b_value, b_lse, b_delta, b_dq, b_row, scale2, DOT)
        for s in tl.range(0, whole, BN, num_stages=STAGES):
            b_key = tl.load(p_cached_key + (s + o_slot)[:, None] * D, mask=m_dim, other=0.0)
            b_value = tl.load(p_cached_value + (s + o_slot)[:, None] * D, mask=m_dim, other=0.0)
            b_dot = tl.dot(b_q, tl.trans(b_key), input_precision=DOT)
            b_dq, b_row = _towards_query(b_dot, b_grad, b_key, b_value, b_lse, b_delta, b_dq, b_row, scale2, DOT)
        if whole < seen:
            m_slot = whole + o_slot < seen
            b_key = tl.load(p_cached_key + (whole + o_slot)[:, None] * D, mask=m_slot[:, None] & m_dim, other=0.0)
            b_value = tl.load(p_cached_value + (whole + o_slot)[:, None] * D, mask=m_slot[:, None] & m_dim, other=0.0)
            b_dot = tl.dot(b_q, tl.trans(b_key), input_precision=DOT)
            b_dot = tl.where(m_slot[None, :], b_dot, float("-inf"))
            b_dq, b_row = _towards_query(b_dot, b_grad, b_key, b_value, b_lse, b_delta, b_dq, b_row, scale2, DOT)
        b_dq *= scale
        if FACTOR:
            b_dq *= tl.load(p_window_factor + i_head)
        store_rows(p_grad_query, b_dq, i_batch, T, H, i_head, o_query, o_dim, D)
        if FACTOR:
            # No linear terms to weigh against: the sum is that of epsilon, and else what rounding left of delta.
            b_alone = b_delta * (epsilon / b_denominator) / tl.load(p_window_factor + i_head)
            tl.store(p_grad_factor + o_number, tl.where(b_linear > 0, b_row, b_alone), mask=m_query)


@triton.jit
def _towards_keys(
    queries, at, b_key, b_value, b_dk, b_dv, o_query, o_from, factor, scale2, o_dim, D: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """A block of queries into the gradients of keys (without scale) and values; a key is seen from position o_from on."""
    p_query, p_grad, p_lse, p_delta = queries
    i_batch, T, H, i_head = at
    b_q = load_rows(p_query, i_batch, T, H, i_head, o_query, o_dim, D)
    b_grad = load_rows(p_grad, i_batch, T, H, i_head, o_query, o_dim, D)
    m_query = o_query < T
    o_number = (i_batch.to(tl.int64) * H + i_head) * T + o_query
    b_lse = tl.load(p_lse + o_number, mask=m_query, other=0.0)
    b_delta = tl.load(p_delta + o_number, mask=m_query, other=0.0)
    b_dot = tl.dot(b_key, tl.trans(b_q), input_precision=DOT)
    m_seen = (o_query[None, :] >= o_from[:, None]) & m_query[None, :]
    b_p = tl.where(m_seen, factor * tl.exp2(b_dot * scale2 - b_lse[None, :]), 0.0)
    b_dv = tl.dot(b_p.to(b_grad.dtype), b_grad, b_dv, input_precision=DOT)
    b_ds = b_p * (tl.dot(b_value, tl.trans(b_grad), input_precision=DOT) - b_delta[None, :])
    b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=DOT)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["T", "H", "HS", "K", "N"])
def backward_salient_kernel(
    p_query, p_grad, p_window_factor, p_salient_key, p_salient_value, p_lse, p_delta, p_grad_salient_key, p_grad_salient_value,
    T, H, HS, K, N, scale,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    FACTOR: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Gradients of the salient keys and values through the softmax, float32 [B, HS, N, D]. Grid (ceil(N / BN), HS, B)."""
    i_select = tl.program_id(1)
    i_batch = tl.program_id(2)
    o_slot = tl.program_id(0) * BN + tl.arange(0, BN)
    o_dim = tl.arange(0, DP)
    o_place = ((i_batch.to(tl.int64) * HS + i_select) * N + o_slot)[:, None] * D + o_dim[None, :]
    mask = (o_slot < N)[:, None] & (o_dim < D)[None, :]
    b_key = tl.load(p_salient_key + o_place, mask=mask, other=0.0)
    b_value = tl.load(p_salient_value + o_place, mask=mask, other=0.0)
    queries = (p_query, p_grad, p_lse, p_delta)
    b_dk = tl.zeros([BN, DP], tl.float32)
    b_dv = tl.zeros([BN, DP], tl.float32)
    o_from = (o_slot // K + 2) * C
    begin = (tl.program_id(0) * BN // K + 2) * C
    for i_head in range(i_select * (H // HS), (i_select + 1) * (H // HS)):
        factor = 1.0
        if FACTOR:
            factor = tl.load(p_window_factor + i_head)
        for o_first in tl.range(begin, T, BM, num_stages=STAGES):
            b_dk, b_dv = _towards_keys(
                queries, (i_batch, T, H, i_head), b_key, b_value, b_dk, b_dv, o_first + tl.arange(0, BM), o_from, factor,
                scale * LOG2E, o_dim, D, DOT,
            )  # fmt: skip
    tl.store(p_grad_salient_key + o_place, b_dk * scale, mask=mask)
    tl.store(p_grad_salient_value + o_place, b_dv, mask=mask)


@triton.jit(do_not_specialize=["T", "H", "HK", "HS", "K", "late", "n_flags"])
def backward_key_kernel(
    p_query, p_key, p_value, p_grad, p_window_factor, p_folds, p_lse, p_delta, p_linear_grad_key, p_linear_grad_value,
    p_grad_salient_key, p_grad_salient_value, p_grad_key, p_grad_value,
    T, H, HK, HS, K, late, n_flags, scale,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, FACTOR: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values: through the window, and what the kernels of salient and linear terms found of them.

    linear_grad_*: [B, late * C, H, D]; grad_salient_*: [B, HS, late * K, D]. BM divides C. Grid (ceil(T / C), HK, B).
    """
    i_chunk = tl.program_id(0)
    i_kv = tl.program_id(1)
    i_batch = tl.program_id(2)
    G = H // HK
    o_row = tl.arange(0, C)
    o_key = i_chunk * C + o_row
    o_dim = tl.arange(0, DP)
    b_key = load_rows(p_key, i_batch, T, HK, i_kv, o_key, o_dim, D)
    b_value = load_rows(p_value, i_batch, T, HK, i_kv, o_key, o_dim, D)
    queries = (p_query, p_grad, p_lse, p_delta)
    b_dk = tl.zeros([C, DP], tl.float32)
    b_dv = tl.zeros([C, DP], tl.float32)
    for i_head in range(i_kv * G, (i_kv + 1) * G):
        factor = 1.0
        if FACTOR:
            factor = tl.load(p_window_factor + i_head)
        for o_first in tl.range(i_chunk * C, tl.minimum((i_chunk + 2) * C, T), BM, num_stages=STAGES):
            b_dk, b_dv = _towards_keys(
                queries, (i_batch, T, H, i_head), b_key, b_value, b_dk, b_dv, o_first + tl.arange(0, BM), o_key, factor,
                scale * LOG2E, o_dim, D, DOT,
            )  # fmt: skip
    b_dk *= scale
    if i_chunk < late:
        for i_head in range(i_kv * G, (i_kv + 1) * G):
            b_dk += load_rows(p_linear_grad_key, i_batch, late * C, H, i_head, o_key, o_dim, D).to(tl.float32)
            b_dv += load_rows(p_linear_grad_value, i_batch, late * C, H, i_head, o_key, o_dim, D).to(tl.float32)
        for i_select in range(i_kv * (HS // HK), (i_kv + 1) * (HS // HK)):
            p_flags = p_folds + ((i_batch.to(tl.int64) * n_flags + i_chunk + 2) * HS + i_select) * C
            m_kept, o_turn = kept_turn(p_flags, o_row)
            o_slot = (i_batch.to(tl.int64) * HS + i_select) * (late * K) + i_chunk * K + o_turn
            mask = m_kept[:, None] & (o_dim < D)[None, :]
            o_place = o_slot[:, None] * D + o_dim[None, :]
            b_dk += tl.load(p_grad_salient_key + o_place, mask=mask, other=0.0)
            b_dv += tl.load(p_grad_salient_value + o_place, mask=mask, other=0.0)
    store_rows(p_grad_key, b_dk, i_batch, T, HK, i_kv, o_key, o_dim, D)
    store_rows(p_grad_value, b_dv, i_batch, T, HK, i_kv, o_key, o_dim, D)
