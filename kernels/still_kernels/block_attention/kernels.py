"""Attention to chosen blocks. The call's keys and values are first written to the cache, so that blocks are read from the cache alone.

Few tokens: several programs share the blocks of each token, and a last launch merges their results. Prompts: the tokens of one matrix
instruction process the union of their blocks, masked by token. The launches do not depend on the filled length.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.attention.kernels import append_tokens
from still_kernels.common.triton_shared import LOG2E, absorb, prefetch, rounded, row_of, wait_for_ahead


@triton.jit(do_not_specialize=["T", "HK", "N"])
def append_kernel(
    p_key, p_value, p_present_key, p_present_value, p_new_tokens, p_past_length, T, HK, N,
    D: tl.constexpr, DP: tl.constexpr, BT: tl.constexpr, SETTLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BT tokens of one head to the cache. Grid (ceil(T / BT), HK, B)."""
    wait_for_ahead(PDL, SETTLE)
    i_head = tl.program_id(1)
    row, start, length, count = row_of(tl.program_id(2), p_new_tokens, p_past_length, None, None, T, False)
    o_token = tl.program_id(0) * BT + tl.arange(0, BT)
    o_dim = tl.arange(0, DP)
    fresh, base = (start * HK + i_head) * D, (row * HK + i_head) * N * D
    m_token = o_token < count
    append_tokens(p_key + fresh, p_present_key + base, 0, o_token, m_token, length, N, HK * D, o_dim, D, 0)
    append_tokens(p_value + fresh, p_present_value + base, 0, o_token, m_token, length, N, HK * D, o_dim, D, 0)


@triton.jit
def _absorb_keys(
    b_acc, b_max, b_sum, b_q, p_key, p_value, first, o_key, m_key, m_seen, scale2, o_dim, D: tl.constexpr, SETTLE: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Rows first + o_key of one head's cache into the running softmax of those that see them, m_seen [BM, BN or 1]."""
    o_tile = first.to(tl.int64) * D + (o_key[:, None] * D + o_dim[None, :])
    mask = m_key[:, None] & (o_dim < D)[None, :]
    b_key = tl.load(p_key + o_tile, mask=mask, other=0.0)
    b_dot = tl.dot(b_q, tl.trans(b_key), input_precision=DOT)
    b_value = tl.load(p_value + o_tile, mask=mask, other=0.0)
    b_dot = tl.where(m_seen, b_dot, float("-inf"))
    return absorb(b_acc, b_max, b_sum, b_dot, b_value, scale2, SETTLE, DOT)


@triton.jit(do_not_specialize=["T", "H", "HK", "N", "S"])
def decode_kernel(
    p_query, p_present_key, p_present_value, p_blocks, p_new_tokens, p_past_length, p_part_acc, p_part_ml,
    T, H, HK, N, S, scale,
    D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    BP: tl.constexpr, SETTLE: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Part of one token's blocks, for up to BR heads of a group. Grid (NS, HK * T * ceil(G / BR), B).

    p_part_acc, p_part_ml: [B, T, H, NS, D] and, maximum and sum, [B, T, H, NS, 2].
    """
    i_split, splits = tl.program_id(0), tl.num_programs(0)
    i_batch = tl.program_id(2)
    G = H // HK
    pieces = (G + BR - 1) // BR
    i_piece = tl.program_id(1) % pieces
    i_kv = tl.program_id(1) // pieces % HK
    token = tl.program_id(1) // pieces // HK
    row = i_batch.to(tl.int64)
    base = (row * HK + i_kv) * N * D
    p_list = p_blocks + ((row * T + token) * HK + i_kv) * S
    o_dim = tl.arange(0, DP)
    if PDL and SETTLE:
        # The first block is brought to L2 while the kernel ahead still runs; nothing is used before that has ended.
        block = tl.load(p_list + i_split)
        if (block >= 0) & (block < (N + BLOCK - 1) // BLOCK):
            o_ahead = base + tl.minimum(block * BLOCK + tl.arange(0, BP), N - 1) * D
            o_line = 128 * tl.arange(0, max(DP * p_present_key.dtype.element_ty.primitive_bitwidth // 1024, 1))
            prefetch(p_present_key + o_ahead, o_line, SETTLE)
            prefetch(p_present_value + o_ahead, o_line, SETTLE)
    wait_for_ahead(PDL, SETTLE)
    row, start, length, count = row_of(i_batch, p_new_tokens, p_past_length, None, None, T, False)
    if token >= count:
        return
    position = length + token
    o_head = i_piece * BR + tl.arange(0, BR)
    m_head = o_head < G
    mask = m_head[:, None] & (o_dim < D)[None, :]
    o_query = (start + token) * H + i_kv * G + o_head
    b_q = tl.load(p_query + o_query[:, None] * D + o_dim[None, :], mask=mask, other=0.0)
    last = tl.minimum(position, N - 1)
    b_max = tl.full([BR], -1.0e30, tl.float32)
    b_sum = tl.zeros([BR], tl.float32)
    b_acc = tl.zeros([BR, DP], tl.float32)
    o_key = tl.arange(0, BN)
    for slot in tl.range(i_split, S, splits, num_stages=STAGES):
        block = tl.load(p_list + slot)
        block = tl.where(block < (N + BLOCK - 1) // BLOCK, block, -1)  # builders time kernels on garbage
        for n in tl.static_range(0, BLOCK, BN):
            o_row = block * BLOCK + n + o_key
            m_key = (block >= 0) & (n + o_key < BLOCK) & (o_row <= last)
            b_acc, b_max, b_sum = _absorb_keys(
                b_acc, b_max, b_sum, b_q, p_present_key + base, p_present_value + base,
                block * BLOCK + n, o_key, m_key, m_key[None, :] & m_head[:, None], scale * LOG2E, o_dim, D,
                SETTLE, DOT,
            )  # fmt: skip
    o_part = o_query * splits + i_split
    tl.store(p_part_acc + o_part[:, None] * D + o_dim[None, :], b_acc, mask=mask)
    tl.store(p_part_ml + o_part * 2, b_max, mask=m_head)
    tl.store(p_part_ml + o_part * 2 + 1, b_sum, mask=m_head)


@triton.jit(do_not_specialize=["T", "H", "N", "NS"])
def merge_kernel(
    p_new_tokens, p_past_length, p_part_acc, p_part_ml, p_output, T, H, N, NS,
    D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, SETTLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The output of one token and head from its NS <= BS parts. Grid (H, T, B)."""
    wait_for_ahead(PDL, SETTLE)
    i_head, token = tl.program_id(0), tl.program_id(1)
    _, start, length, count = row_of(tl.program_id(2), p_new_tokens, p_past_length, None, None, T, False)
    o_dim = tl.arange(0, DP)
    o_part = tl.arange(0, BS)
    at = (start + token) * H + i_head
    p_to = p_output + at * D + o_dim
    if token >= count:
        tl.store(p_to, tl.zeros([DP], p_output.dtype.element_ty), mask=o_dim < D)
        return
    m_part = o_part < NS
    b_most = tl.load(p_part_ml + (at * NS + o_part) * 2, mask=m_part, other=-1.0e30)
    b_sums = tl.load(p_part_ml + (at * NS + o_part) * 2 + 1, mask=m_part, other=0.0)
    mask = m_part[:, None] & (o_dim < D)[None, :]
    b_acc = tl.load(p_part_acc + (at * NS + o_part)[:, None] * D + o_dim[None, :], mask=mask, other=0.0)
    b_weight = tl.exp2(b_most - tl.max(b_most, 0))
    b_out = tl.sum(b_acc * b_weight[:, None], 0) / tl.sum(rounded(b_sums, b_weight), 0)
    b_out = tl.where(length + token >= N, float("nan"), b_out)  # beyond the state: the caller should have refused
    tl.store(p_to, b_out.to(p_output.dtype.element_ty), mask=o_dim < D)


@triton.jit(do_not_specialize=["T", "HK", "N", "S", "U", "TOKENS", "first", "span"])
def unite_kernel(
    p_blocks, p_new_tokens, p_past_length, p_united, p_readers, p_many, T, HK, N, S, U, TOKENS, first, span,
    BC: tl.constexpr, SP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The blocks that any of a tile's tokens has chosen, ascending, and as bits which have. Grid (tiles, HK, B).

    p_united, p_readers: [B, tiles, HK, U]; how many there are, and how many before the first token's own, p_many [B, tiles, HK, 2].
    """
    i_tile, i_head, i_batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, start, length, count = row_of(i_batch, p_new_tokens, p_past_length, None, None, T, False)
    token = first + i_tile * TOKENS
    end = tl.minimum(tl.minimum(token + TOKENS, first + span), count)
    at = (i_batch.to(tl.int64) * tl.num_programs(0) + i_tile) * tl.num_programs(1) + i_head
    blocks = tl.where(end > token, (tl.minimum(length + end, N) + BLOCK - 1) // BLOCK, 0)
    o_slot = tl.arange(0, SP)
    many, whole = 0, 0
    own = (length + token) // BLOCK
    for s in range(0, blocks, BC):
        o_block = s + tl.arange(0, BC)
        b_bits = tl.zeros([BC], tl.int32)
        for t in range(token, end):
            p_list = p_blocks + ((start + t) * HK + i_head) * S
            b_list = tl.load(p_list + o_slot, mask=o_slot < S, other=-1) - s
            b_has = tl.histogram(b_list, BC, mask=(b_list >= 0) & (b_list < BC))
            b_bits |= (b_has > 0).to(tl.int32) << (t - token)
        m_has = (b_bits != 0) & (o_block < blocks)
        b_has = m_has.to(tl.int32)
        o_to = at * U + many + tl.cumsum(b_has, 0) - 1
        tl.store(p_united + o_to, o_block, mask=m_has)
        tl.store(p_readers + o_to, b_bits, mask=m_has)
        many += tl.sum(b_has, 0)
        whole += tl.sum(tl.where(o_block < own, b_has, 0), 0)
    tl.store(p_many + 2 * at, many)
    tl.store(p_many + 2 * at + 1, whole)


@triton.jit(do_not_specialize=["T", "H", "HK", "N", "U", "TOKENS", "first", "span"])
def attend_kernel(
    p_query, p_present_key, p_present_value, p_new_tokens, p_past_length, p_united, p_readers, p_many, p_output,
    T, H, HK, N, U, TOKENS, scale, first, span,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    SETTLE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Output of TOKENS tokens of one group of heads. Grid (tiles, HK, B). The longest start first."""
    i_tile, i_kv, i_batch = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, start, length, count = row_of(i_batch, p_new_tokens, p_past_length, None, None, T, False)
    G = H // HK
    o_dim = tl.arange(0, DP)
    o_row = tl.arange(0, BM)
    o_place = o_row // G  # of the tile
    o_token = first + i_tile * TOKENS + o_place
    m_store = (o_place < TOKENS) & (o_token < tl.minimum(first + span, T))
    m_row = m_store & (o_token < count)
    o_query = ((start + o_token) * H + i_kv * G + o_row % G)[:, None] * D + o_dim[None, :]
    b_q = tl.load(p_query + o_query, mask=m_row[:, None] & (o_dim < D)[None, :], other=0.0)
    base = (row * HK + i_kv) * N * D
    at = (i_batch.to(tl.int64) * tl.num_programs(0) + i_tile) * tl.num_programs(1) + i_kv
    many, whole = tl.load(p_many + 2 * at), tl.load(p_many + 2 * at + 1)
    if BLOCK % BN > 0:
        whole = many * 0
    b_last = tl.where(m_row, tl.minimum(length + o_token, N - 1), -1)
    b_max = tl.full([BM], -1.0e30, tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, DP], tl.float32)
    o_key = tl.arange(0, BN)
    o_bit = tl.minimum(o_place, 31)
    # Blocks that all of the tile's tokens may see to their ends: who has chosen them does.
    for i in tl.range(0, whole, num_stages=STAGES):
        block = tl.load(p_united + at * U + i)
        m_reads = (((tl.load(p_readers + at * U + i) >> o_bit) & 1) != 0)[:, None]
        for n in tl.static_range(0, BLOCK, BN):
            b_acc, b_max, b_sum = _absorb_keys(
                b_acc, b_max, b_sum, b_q, p_present_key + base, p_present_value + base, block * BLOCK + n, o_key, o_key >= 0,
                m_reads, scale * LOG2E, o_dim, D, SETTLE, DOT,
            )  # fmt: skip
    for i in tl.range(whole, many, num_stages=STAGES):
        block = tl.load(p_united + at * U + i)
        m_reads = (((tl.load(p_readers + at * U + i) >> o_bit) & 1) != 0)[:, None]
        for n in tl.static_range(0, BLOCK, BN):
            o_at = block * BLOCK + n + o_key
            m_key = (n + o_key < BLOCK) & (o_at < N) & (o_at <= length + count - 1)
            m_seen = m_reads & (o_at[None, :] <= b_last[:, None]) & (n + o_key < BLOCK)[None, :]
            b_acc, b_max, b_sum = _absorb_keys(
                b_acc, b_max, b_sum, b_q, p_present_key + base, p_present_value + base, block * BLOCK + n, o_key, m_key,
                m_seen, scale * LOG2E, o_dim, D, SETTLE, DOT,
            )  # fmt: skip
    b_out = b_acc / b_sum[:, None]
    b_out = tl.where((length + o_token >= N)[:, None], float("nan"), b_out)
    b_out = tl.where(m_row[:, None], b_out, 0.0)
    tl.store(p_output + o_query, b_out.to(p_output.dtype.element_ty), mask=m_store[:, None] & (o_dim < D)[None, :])


FUNCTIONS = {
    "append": append_kernel,
    "decode": decode_kernel,
    "merge": merge_kernel,
    "unite": unite_kernel,
    "attend": attend_kernel,
}
