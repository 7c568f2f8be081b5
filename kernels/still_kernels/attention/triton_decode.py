"""A few tokens per row in one launch: the filled rows of a cache are shared by several programs, merged by the last to arrive.

The rows of a program's GEMMs are the query heads of a group at the call's tokens, so the cache is read once for all of them.
Programs with one key/value head and block of rows share a counter: each writes its partial result, then counts itself; the last one
merges all. The counters are zero between launches, so the launch can be captured in a CUDA graph.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.attention.triton_attend import absorb_cached, absorb_fresh, append_tokens
from still_kernels.common.triton_shared import LOG2E, rounded, row_of, scales_at


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
