"""Which blocks each token reads, in four launches: sums of the new keys; the normalizer over coarse means; weights of fine means, as the
best of each block; the best blocks by the digits of their scores. Nothing is sorted, and no size on the host depends on what is filled.

Where queries have 16 bits, means of 32 enter matrix instructions as parts of 16, whose sum they are to 22 bits and more.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import row_of

MOST = tl.constexpr(1e37)  # where scores end
CEILING = tl.constexpr(80.0)  # of a weight's exponent
DIGITS = tl.constexpr(256)


@triton.jit(do_not_specialize=["T", "HK", "N"])
def add_kernel(
    p_key, p_key_sum, p_new_tokens, p_past_length, T, HK, N,
    D: tl.constexpr, DP: tl.constexpr, STRIDE: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """One sum of STRIDE keys with those that the call brings of it. Grid (rows that T tokens may touch, HK, B)."""
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    row, start, length, count = row_of(i_batch, p_new_tokens, p_past_length, None, None, T, False)
    i_sum = length // STRIDE + tl.program_id(0)
    o_dim = tl.arange(0, DP)
    o_key = tl.arange(0, KP)
    o_token = i_sum * STRIDE + o_key - length
    if (i_sum >= N) | (tl.maximum(i_sum * STRIDE - length, 0) >= count):
        return
    mask = ((o_token >= 0) & (o_token < count) & (o_key < STRIDE))[:, None] & (o_dim < D)[None, :]
    b_key = tl.load(p_key + ((start + o_token) * HK + i_head)[:, None] * D + o_dim[None, :], mask=mask, other=0.0)
    p_sum = p_key_sum + ((row * HK + i_head) * N + i_sum) * D + o_dim
    before = (i_sum * STRIDE < length) & (o_dim < D)  # what is not filled is not read
    b_sum = tl.load(p_sum, mask=before, other=0.0) + tl.sum(b_key.to(tl.float32), 0)
    tl.store(p_sum, b_sum, mask=o_dim < D)


@triton.jit
def _mean(p_sums, o_mean, end, o_dim, STEP: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Sums [BJ, DP] of WIDTH rows at every STEP-th one; rows from `end` on are zero."""
    o_row = o_mean * STEP
    b_sum = tl.load(
        p_sums + o_row[:, None] * D + o_dim[None, :], mask=(o_row < end)[:, None] & (o_dim < D)[None, :], other=0.0
    )
    for r in tl.static_range(1, WIDTH):
        mask = (o_row + r < end)[:, None] & (o_dim < D)[None, :]
        b_sum += tl.load(p_sums + (o_row + r)[:, None] * D + o_dim[None, :], mask=mask, other=0.0)
    return b_sum


@triton.jit
def _products(b_q, b_mean, PARTS: tl.constexpr, DOT: tl.constexpr):
    """Queries [BM, DP] times means [BJ, DP], these in PARTS parts of the queries' type."""
    b_part = b_mean.to(b_q.dtype)
    b_dot = tl.dot(b_q, tl.trans(b_part), input_precision=DOT)
    for _ in tl.static_range(1, PARTS):
        b_mean -= b_part.to(tl.float32)
        b_part = b_mean.to(b_q.dtype)
        b_dot = tl.dot(b_q, tl.trans(b_part), b_dot, input_precision=DOT)
    return b_dot


@triton.jit
def _complete(o_position, STEP: tl.constexpr, LENGTH: tl.constexpr):
    """How many means of LENGTH keys are complete at positions."""
    return tl.where(o_position + 1 < LENGTH, 0, (o_position + 1 - LENGTH) // STEP + 1)


@triton.jit
def _rows(
    p_query, start, first, length, count, i_tile, i_kv, H, HK, end, o_dim, D: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Queries [BM, DP] of a tile's tokens, GP heads each, their positions [BM], and the position of its last token, before `end`; -1
    without any."""
    G = H // HK
    o_row = tl.arange(0, BM)
    o_token = first + i_tile * (BM // GP) + o_row // GP
    m_row = (o_token < count) & (o_row % GP < G)
    p_tile = p_query + ((start + o_token) * H + i_kv * G + o_row % GP)[:, None] * D + o_dim[None, :]
    b_q = tl.load(p_tile, mask=m_row[:, None] & (o_dim < D)[None, :], other=0.0)
    last = tl.minimum(first + (i_tile + 1) * (BM // GP), count) - 1
    last = tl.where(last < first + i_tile * (BM // GP), -1, tl.minimum(length + last, end - 1))
    return b_q, length + o_token, last


@triton.jit(do_not_specialize=["T", "H", "HK", "N", "NS", "first"])
def normalize_kernel(
    p_query, p_key_sum, p_new_tokens, p_past_length, p_part_ml, T, H, HK, N, NS, scale, first,
    D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr, STRIDE: tl.constexpr,
    LSE_STRIDE: tl.constexpr, LSE_LENGTH: tl.constexpr, DENSE: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of exponentials over part of the coarse means, of the tokens from `first` on. Grid (NS, HK * tiles, B)."""
    i_split = tl.program_id(0)
    tiles = tl.num_programs(1) // HK
    i_kv, i_tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    i_batch = tl.program_id(2)
    row, start, length, count = row_of(i_batch, p_new_tokens, p_past_length, None, None, T, False)
    o_dim = tl.arange(0, DP)
    b_q, o_position, last = _rows(
        p_query, start, first, length, count, i_tile, i_kv, H, HK, N * STRIDE, o_dim, D, GP, BM
    )
    if last + 1 < DENSE:
        return
    end = tl.minimum((last + 1) // STRIDE, N)  # sums that are complete
    p_sums = p_key_sum + (row * HK + i_kv) * N * D
    b_limit = _complete(o_position, LSE_STRIDE, LSE_LENGTH)
    many = _complete(last, LSE_STRIDE, LSE_LENGTH)
    size = ((many + NS - 1) // NS + BJ - 1) // BJ * BJ
    b_max = tl.full([BM], -1.0e30, tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    for s in range(i_split * size, tl.minimum((i_split + 1) * size, many), BJ):
        o_mean = s + tl.arange(0, BJ)
        b_mean = _mean(p_sums, o_mean, end, o_dim, LSE_STRIDE // STRIDE, LSE_LENGTH // STRIDE, D)
        b_logit = _products(b_q, b_mean * (1.0 / LSE_LENGTH), PARTS, DOT) * scale
        b_logit = tl.where(o_mean[None, :] < b_limit[:, None], b_logit, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_logit, 1))
        b_sum = b_sum * tl.exp(b_max - b_new) + tl.sum(tl.exp(b_logit - b_new[:, None]), 1)
        b_max = b_new
    o_part = (
        ((i_batch.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * NS + i_split) * BM + tl.arange(0, BM)
    ) * 2
    tl.store(p_part_ml + o_part, b_max)
    tl.store(p_part_ml + o_part + 1, b_sum)


@triton.jit(do_not_specialize=["T", "H", "HK", "N", "NS", "NB", "first", "chunk"])
def score_kernel(
    p_query, p_key_sum, p_new_tokens, p_past_length, p_part_ml, p_best, p_tail, T, H, HK, N, NS, NB, scale, first, chunk,
    D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr, BS: tl.constexpr,
    STRIDE: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr, DENSE: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Of each block the largest weight of the means that begin in it, and of those that reach into the next. Grid (splits, HK * tiles, B).

    p_best, p_tail: [B, chunk, HK, NB].
    """
    PER: tl.constexpr = BLOCK // STRIDE
    i_split, splits = tl.program_id(0), tl.num_programs(0)
    tiles = tl.num_programs(1) // HK
    i_kv, i_tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    i_batch = tl.program_id(2)
    row, start, length, count = row_of(i_batch, p_new_tokens, p_past_length, None, None, T, False)
    o_dim = tl.arange(0, DP)
    b_q, o_position, last = _rows(
        p_query, start, first, length, count, i_tile, i_kv, H, HK, N * STRIDE, o_dim, D, GP, BM
    )
    if last + 1 < DENSE:
        return
    o_part = tl.arange(0, BS)
    p_ml = p_part_ml + (i_batch.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * NS * BM * 2
    o_ml = (o_part[None, :] * BM + tl.arange(0, BM)[:, None]) * 2
    b_most = tl.load(p_ml + o_ml, mask=(o_part < NS)[None, :], other=-1.0e30)
    b_sums = tl.load(p_ml + o_ml + 1, mask=(o_part < NS)[None, :], other=0.0)
    b_max = tl.max(b_most, 1)
    b_total = b_max + tl.log(tl.sum(b_sums * tl.exp(b_most - b_max[:, None]), 1))
    end = tl.minimum((last + 1) // STRIDE, N)
    p_sums = p_key_sum + (row * HK + i_kv) * N * D
    b_limit = tl.where(tl.arange(0, BM) % GP < H // HK, _complete(o_position, STRIDE, LENGTH), 0)
    many = last // BLOCK * PER  # means that begin before the last token's own block
    size = ((many + splits - 1) // splits + BJ - 1) // BJ * BJ
    o_token = i_tile * (BM // GP) + tl.arange(0, BM // GP)  # of the chunk
    p_to = ((i_batch.to(tl.int64) * chunk + o_token) * HK + i_kv)[:, None] * NB
    o_per = tl.arange(0, PER)[None, None, :]
    for s in range(i_split * size, tl.minimum((i_split + 1) * size, many), BJ):
        o_mean = s + tl.arange(0, BJ)
        b_mean = _mean(p_sums, o_mean, end, o_dim, 1, LENGTH // STRIDE, D)
        b_logit = _products(b_q, b_mean * (1.0 / LENGTH), PARTS, DOT) * scale
        b_share = tl.exp(tl.minimum(b_logit - b_total[:, None], CEILING))
        b_share = tl.where(o_mean[None, :] < b_limit[:, None], b_share, 0.0)
        b_share = tl.sum(tl.reshape(b_share, [BM // GP, GP, BJ]), 1)
        b_share = tl.reshape(tl.minimum(b_share, MOST), [BM // GP, BJ // PER, PER])
        b_tail = tl.where(o_per >= PER + 1 - LENGTH // STRIDE, b_share, 0.0)
        o_block = s // PER + tl.arange(0, BJ // PER)
        mask = (first + o_token < count)[:, None] & (o_token < chunk)[:, None] & (o_block < NB)[None, :]
        tl.store(p_best + p_to + o_block[None, :], tl.max(b_share, 2), mask=mask)
        tl.store(p_tail + p_to + o_block[None, :], tl.max(b_tail, 2), mask=mask)


@triton.jit
def _ranks(p_best, p_tail, o_block, end, INIT: tl.constexpr):
    """Scores of blocks as integers of the same order, and which there are: INIT and on, before `end`."""
    m_block = (o_block >= INIT) & (o_block < end)
    b_best = tl.load(p_best + o_block, mask=m_block, other=0.0)
    b_tail = tl.load(p_tail + o_block - 1, mask=m_block & (o_block > 0), other=0.0)
    return tl.maximum(b_best, b_tail).to(tl.int32, bitcast=True) & 0x7FFFFFFF, m_block


@triton.jit
def _take(p_best, p_tail, p_to, end, take, every, BC: tl.constexpr, INIT: tl.constexpr):
    """Write the `take` best of the blocks INIT .. end - 1 to slots INIT and on, ascending; the slot behind them."""
    # The score of the last that is taken, digit by digit; `need`: how many of those with these digits are taken.
    o_digit = tl.arange(0, DIGITS)
    need = take
    found = take * 0
    if every == 0:
        for i in tl.static_range(4):
            b_counts = tl.zeros([DIGITS], tl.int32)
            for s in range(INIT, end, BC):
                b_rank, m_block = _ranks(p_best, p_tail, s + tl.arange(0, BC), end, INIT)
                if i > 0:
                    m_block = m_block & ((b_rank >> (32 - 8 * i)) == found)
                b_counts += tl.histogram((b_rank >> (24 - 8 * i)) & 255, DIGITS, mask=m_block)
            b_least = tl.cumsum(b_counts, 0, reverse=True)  # with this digit or a larger one
            digit = tl.sum((b_least >= need).to(tl.int32), 0) - 1
            need -= tl.sum(tl.where(o_digit == digit, b_least - b_counts, 0), 0)
            found = found * 256 + digit
    at = INIT + take * 0
    equal = take * 0
    for s in range(INIT, end, BC):
        o_block = s + tl.arange(0, BC)
        b_rank, m_block = _ranks(p_best, p_tail, o_block, end, INIT)
        b_equal = ((b_rank == found) & m_block).to(tl.int32)
        m_take = m_block & (every | (b_rank > found) | ((b_equal > 0) & (equal + tl.cumsum(b_equal, 0) <= need)))
        b_take = m_take.to(tl.int32)
        tl.store(p_to + at + tl.cumsum(b_take, 0) - 1, o_block, mask=m_take)
        at += tl.sum(b_take, 0)
        equal += tl.sum(b_equal, 0)
    return at


@triton.jit(do_not_specialize=["T", "HK", "NB", "S", "first", "chunk"])
def choose_kernel(
    p_new_tokens, p_past_length, p_best, p_tail, p_blocks, T, HK, NB, S, first, chunk,
    BC: tl.constexpr, SP: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    DENSE: tl.constexpr,
):  # fmt: skip
    """The list of one token: what is chosen always, and between it the blocks of the best scores, ascending. Grid (chunk, HK, B)."""
    i_token, i_head, i_batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, _, length, count = row_of(i_batch, p_new_tokens, p_past_length, None, None, T, False)
    token = first + i_token
    if token >= T:
        return
    o_slot = tl.arange(0, SP)
    p_to = p_blocks + ((i_batch.to(tl.int64) * T + token) * HK + i_head) * S
    if token >= count:
        tl.store(p_to + o_slot, tl.full([SP], -1, tl.int32), mask=o_slot < S)
        return
    own = (length + token) // BLOCK
    end = own - LOCAL  # scores decide on those from INIT on, before it
    open_blocks = tl.maximum(end - INIT, 0)
    if (length + token + 1 < DENSE) | (open_blocks == 0):
        tl.store(p_to + o_slot, tl.where(o_slot <= own, o_slot, -1), mask=o_slot < S)
        return
    tl.store(p_to + o_slot, o_slot, mask=o_slot < INIT)
    at = INIT
    if TOP > INIT + LOCAL + 1:
        p_from = ((i_batch.to(tl.int64) * chunk + i_token) * HK + i_head) * NB
        take = tl.minimum(TOP - (own + 1 - open_blocks), open_blocks)
        at = _take(p_best + p_from, p_tail + p_from, p_to, tl.minimum(end, NB), take, take == open_blocks, BC, INIT)
    # The blocks before the token's own; -1 behind them.
    o_near = own - LOCAL + o_slot
    tl.store(p_to + at + o_slot, tl.where(o_near <= own, o_near, -1), mask=at + o_slot < S)


FUNCTIONS = {
    "add": add_kernel,
    "normalize": normalize_kernel,
    "score": score_kernel,
    "choose": choose_kernel,
    "normalize_few": normalize_kernel,
    "score_few": score_kernel,
    "choose_few": choose_kernel,
}
