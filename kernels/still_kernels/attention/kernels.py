"""Triton kernels of still::Attention: prompts, and decode steps split over the cache."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import LOG2E, absorb, as_numbers, rounded, row_of, scales_at, store_rows


@triton.jit
def append_tokens(
    p_new, p_cache, p_scale, o_token, m_token, length, N, stride, o_dim, D: tl.constexpr, CODES: tl.constexpr
):
    """Write tokens of the call into their rows of one head's cache; what lies beyond its N rows is written nowhere.

    p_new: The head's row of the call's first token, `stride` elements between tokens.
    """
    o_row = (length + o_token).to(tl.int64)
    m_row = m_token & (o_row < N)
    mask = m_row[:, None] & (o_dim < D)[None, :]
    b_new = tl.load(p_new + o_token[:, None] * stride + o_dim[None, :], mask=mask, other=0.0)
    store_rows(p_cache, p_scale, o_row, b_new, m_row, o_dim, D, CODES)


@triton.jit
def absorb_cached(
    b_acc, b_max, b_sum, b_q, p_key, p_value, p_key_scale, p_value_scale, begin, end, scale2, o_dim, D: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, SETTLE: tl.constexpr, CODES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Rows begin .. end - 1 of one head's cache into the running softmax; every query sees them all."""
    o_key = tl.arange(0, BN)
    o_tile = o_key[:, None] * D + o_dim[None, :]
    m_dim = (o_dim < D)[None, :]
    whole = begin + (end - begin) // BN * BN
    for s in tl.range(begin, whole, BN, num_stages=STAGES):
        b_key = tl.load(p_key + s * D + o_tile, mask=m_dim, other=0.0)
        b_key = as_numbers(b_key, p_key_scale, s + o_key, o_key >= 0, b_q.dtype, CODES)
        b_dot = tl.dot(b_q, tl.trans(b_key), input_precision=DOT)
        b_value = tl.load(p_value + s * D + o_tile, mask=m_dim, other=0.0)
        b_value = as_numbers(b_value, p_value_scale, s + o_key, o_key >= 0, b_q.dtype, CODES)
        b_acc, b_max, b_sum = absorb(b_acc, b_max, b_sum, b_dot, b_value, scale2, SETTLE, DOT)
    for s in tl.range(whole, end, BN, num_stages=1):
        m_key = ((s + o_key) < end)[:, None] & m_dim
        b_key = tl.load(p_key + s * D + o_tile, mask=m_key, other=0.0)
        b_value = tl.load(p_value + s * D + o_tile, mask=m_key, other=0.0)
        b_key = as_numbers(b_key, p_key_scale, s + o_key, (s + o_key) < end, b_q.dtype, CODES)
        b_value = as_numbers(b_value, p_value_scale, s + o_key, (s + o_key) < end, b_q.dtype, CODES)
        b_dot = tl.dot(b_q, tl.trans(b_key), input_precision=DOT)
        b_dot = tl.where(((s + o_key) < end)[None, :], b_dot, float("-inf"))
        b_acc, b_max, b_sum = absorb(b_acc, b_max, b_sum, b_dot, b_value, scale2, SETTLE, DOT)
    return b_acc, b_max, b_sum


@triton.jit
def absorb_fresh(
    b_acc, b_max, b_sum, b_q, p_key, p_value, begin, end, o_query, stride, scale2, o_dim, D: tl.constexpr,
    BN: tl.constexpr, SETTLE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Tokens begin .. end - 1 of the call into the running softmax; a query sees those up to its own."""
    for s in tl.range(begin, end, BN, num_stages=1):
        o_key = s + tl.arange(0, BN)
        m_key = (o_key < end)[:, None] & (o_dim < D)[None, :]
        o_tile = o_key[:, None] * stride + o_dim[None, :]
        b_key = tl.load(p_key + o_tile, mask=m_key, other=0.0)
        b_value = tl.load(p_value + o_tile, mask=m_key, other=0.0)
        b_dot = tl.dot(b_q, tl.trans(b_key), input_precision=DOT)
        m_seen = (o_key[None, :] <= o_query[:, None]) & (o_key < end)[None, :]
        b_dot = tl.where(m_seen, b_dot, float("-inf"))
        b_acc, b_max, b_sum = absorb(b_acc, b_max, b_sum, b_dot, b_value, scale2, SETTLE, DOT)
    return b_acc, b_max, b_sum


@triton.jit(do_not_specialize=["T", "H", "HK", "N"])
def attend_kernel(
    p_query, p_key, p_value, p_present_key, p_present_value, p_key_scale, p_value_scale, p_new_tokens, p_past_length,
    p_output,
    T, H, HK, N, scale,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, SETTLE: tl.constexpr,
    CODES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Output of BM tokens of one query head; the first head of a group appends their keys and values. Grid (ceil(T / BM), H, B).

    The cache is read up to the row's length before the call only, so programs may run in any order. The longest start first.
    """
    i_block = tl.num_programs(0) - 1 - tl.program_id(0)
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    row, start, length, count = row_of(i_batch, p_new_tokens, p_past_length, None, None, T, False)
    first = i_block * BM
    if first >= T:
        return
    o_dim = tl.arange(0, DP)
    o_query = first + tl.arange(0, BM)  # token of the call
    p_tile = ((start + o_query) * H + i_head)[:, None] * D + o_dim[None, :]
    m_store = (o_query < T)[:, None] & (o_dim < D)[None, :]
    if first >= count:  # padding
        tl.store(p_output + p_tile, tl.zeros([BM, DP], p_output.dtype.element_ty), mask=m_store)
        return
    m_query = o_query < count
    b_q = tl.load(p_query + p_tile, mask=m_query[:, None] & (o_dim < D)[None, :], other=0.0)
    G = H // HK
    i_kv = i_head // G
    stride = HK * D
    base = (row * HK + i_kv) * N * D
    p_key_scale = scales_at(p_key_scale, (row * HK + i_kv) * N, CODES)
    p_value_scale = scales_at(p_value_scale, (row * HK + i_kv) * N, CODES)
    p_new_key = p_key + (start * HK + i_kv) * D
    p_new_value = p_value + (start * HK + i_kv) * D
    if i_head % G == 0:
        append_tokens(
            p_new_key, p_present_key + base, p_key_scale, o_query, m_query, length, N, stride, o_dim, D, CODES
        )
        append_tokens(
            p_new_value, p_present_value + base, p_value_scale, o_query, m_query, length, N, stride, o_dim, D, CODES
        )

    scale2 = scale * LOG2E
    b_max = tl.full([BM], -1.0e30, tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, DP], tl.float32)
    b_acc, b_max, b_sum = absorb_cached(
        b_acc, b_max, b_sum, b_q, p_present_key + base, p_present_value + base, p_key_scale, p_value_scale, 0,
        tl.minimum(length, N), scale2, o_dim, D, BN, STAGES, SETTLE, CODES, DOT,
    )  # fmt: skip
    # Tokens of earlier blocks, which all queries see.
    o_tile = tl.arange(0, BN)[:, None] * stride + o_dim[None, :]
    for s in tl.range(0, first, BN, num_stages=STAGES):
        b_key = tl.load(p_new_key + s * stride + o_tile, mask=(o_dim < D)[None, :], other=0.0)
        b_dot = tl.dot(b_q, tl.trans(b_key), input_precision=DOT)
        b_value = tl.load(p_new_value + s * stride + o_tile, mask=(o_dim < D)[None, :], other=0.0)
        b_acc, b_max, b_sum = absorb(b_acc, b_max, b_sum, b_dot, b_value, scale2, SETTLE, DOT)
    b_acc, b_max, b_sum = absorb_fresh(
        b_acc, b_max, b_sum, b_q, p_new_key, p_new_value, first, tl.minimum(first + BM, count), o_query, stride, scale2,
        o_dim, D, BN, SETTLE, DOT,
    )  # fmt: skip
    b_out = b_acc / b_sum[:, None]
    b_out = tl.where(
        (length + o_query >= N)[:, None], float("nan"), b_out
    )  # beyond the state: the caller should have refused
    b_out = tl.where(m_query[:, None], b_out, 0.0)
    tl.store(p_output + p_tile, b_out.to(p_output.dtype.element_ty), mask=m_store)


@triton.jit
def _merge_row(p_acc, p_ml, p_to, parts, beyond, o_dim, D: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr):
    """Combine the partial results of one row, `parts` <= BS of them, BR rows apart, and store its output."""
    o_part = tl.arange(0, BS)
    m_part = o_part < parts
    m_acc = m_part[:, None] & (o_dim < D)[None, :]
    b_acc = tl.load(p_acc + o_part[:, None] * (BR * D) + o_dim[None, :], mask=m_acc, other=0.0)
    b_most = tl.load(p_ml + o_part * (2 * BR), mask=m_part, other=-1.0e30)
    b_sums = tl.load(p_ml + o_part * (2 * BR) + 1, mask=m_part, other=0.0)
    b_weight = tl.exp2(b_most - tl.max(b_most, 0))
    b_out = tl.sum(b_acc * b_weight[:, None], 0) / tl.sum(rounded(b_sums, b_weight), 0)
    b_out = tl.where(beyond, float("nan"), b_out)
    tl.store(p_to + o_dim, b_out.to(p_to.dtype.element_ty), mask=o_dim < D)


@triton.jit(do_not_specialize=["T", "H", "HK", "N", "NS"])
def decode_kernel(
    p_query, p_key, p_value, p_present_key, p_present_value, p_key_scale, p_value_scale, p_new_tokens, p_past_length,
    p_part_acc, p_part_ml, p_counters, p_output,
    T, H, HK, N, NS, scale,
    D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, STAGES: tl.constexpr,
    SETTLE: tl.constexpr, CODES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Output of all new tokens of the rows. Grid (NS, HK * blocks, B), `blocks` of BR rows for T tokens of a group's heads; NS <= BS.

    How a row's cache is cut follows from its length, not from the size of the cache: what is not filled is not read.
    """
    i_split = tl.program_id(0)
    i_group = tl.program_id(1)  # key/value head and block of rows
    i_batch = tl.program_id(2)
    row, start, length, count = row_of(i_batch, p_new_tokens, p_past_length, None, None, T, False)
    G = H // HK
    blocks = tl.num_programs(1) // HK
    i_kv = i_group // blocks
    first = i_group % blocks * BR
    cached = tl.minimum(length, N)
    size = (cached + NS - 1) // NS
    size = tl.maximum((size + BN - 1) // BN, 1) * BN  # keys of one split
    splits = tl.maximum((cached + size - 1) // size, 1)
    if i_split >= splits:
        return
    o_dim = tl.arange(0, DP)
    m_dim = (o_dim < D)[None, :]
    o_row = first + tl.arange(0, BR)
    o_token = o_row // G
    p_tile = ((start + o_token) * H + i_kv * G + o_row % G)[:, None] * D + o_dim[None, :]
    m_store = (o_token < T)[:, None] & m_dim
    if first >= count * G:  # padding
        if i_split == 0:
            tl.store(p_output + p_tile, tl.zeros([BR, DP], p_output.dtype.element_ty), mask=m_store)
        return
    m_row = o_token < count
    b_q = tl.load(p_query + p_tile, mask=m_row[:, None] & m_dim, other=0.0)
    base = (row * HK + i_kv) * N * D
    p_key_scale = scales_at(p_key_scale, (row * HK + i_kv) * N, CODES)
    p_value_scale = scales_at(p_value_scale, (row * HK + i_kv) * N, CODES)
    p_new_key = p_key + (start * HK + i_kv) * D
    p_new_value = p_value + (start * HK + i_kv) * D
    scale2 = scale * LOG2E
    b_max = tl.full([BR], -1.0e30, tl.float32)
    b_sum = tl.zeros([BR], tl.float32)
    b_acc = tl.zeros([BR, DP], tl.float32)
    begin = i_split * size
    b_acc, b_max, b_sum = absorb_cached(
        b_acc, b_max, b_sum, b_q, p_present_key + base, p_present_value + base, p_key_scale, p_value_scale, begin,
        tl.minimum(begin + size, cached), scale2, o_dim, D, BN, STAGES, SETTLE, CODES, DOT,
    )  # fmt: skip
    if i_split == splits - 1:
        b_acc, b_max, b_sum = absorb_fresh(
            b_acc, b_max, b_sum, b_q, p_new_key, p_new_value, 0, count, o_token, HK * D, scale2, o_dim, D, BN, SETTLE, DOT,
        )  # fmt: skip
        if first == 0:
            for s in range(0, count, BR):
                o_new = s + tl.arange(0, BR)
                m_new = o_new < count
                append_tokens(
                    p_new_key, p_present_key + base, p_key_scale, o_new, m_new, length, N, HK * D, o_dim, D, CODES
                )
                append_tokens(
                    p_new_value, p_present_value + base, p_value_scale, o_new, m_new, length, N, HK * D, o_dim, D, CODES
                )
    if splits == 1:
        b_out = b_acc / b_sum[:, None]
        b_out = tl.where((length + o_token >= N)[:, None], float("nan"), b_out)
        b_out = tl.where(m_row[:, None], b_out, 0.0)
        tl.store(p_output + p_tile, b_out.to(p_output.dtype.element_ty), mask=m_store)
        return
    i_first = (i_batch.to(tl.int64) * tl.num_programs(1) + i_group) * NS * BR  # the group's first partial row
    o_part = i_first + i_split * BR + tl.arange(0, BR)
    tl.store(p_part_acc + o_part[:, None] * D + o_dim[None, :], b_acc, mask=m_row[:, None] & m_dim)
    tl.store(p_part_ml + o_part * 2, b_max, mask=m_row)
    tl.store(p_part_ml + o_part * 2 + 1, b_sum, mask=m_row)
    tl.debug_barrier()
    p_counter = p_counters + i_batch * tl.num_programs(1) + i_group
    if tl.atomic_add(p_counter, 1, sem="acq_rel") != splits - 1:
        return
    tl.store(p_counter, 0)
    for r in range(0, tl.minimum(BR, T * G - first)):
        token = (first + r) // G
        p_to = p_output + ((start + token) * H + i_kv * G + (first + r) % G) * D
        if token < count:
            p_acc = p_part_acc + (i_first + r) * D
            _merge_row(p_acc, p_part_ml + (i_first + r) * 2, p_to, splits, length + token >= N, o_dim, D, BR, BS)
        else:
            tl.store(p_to + o_dim, tl.zeros([DP], p_output.dtype.element_ty), mask=o_dim < D)


FUNCTIONS = {"attend": attend_kernel, "decode": decode_kernel}
