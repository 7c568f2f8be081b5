"""Blocks that each token reads. Nothing is sorted, and host-side sizes do not depend on the filled length.

Few tokens: all sums of keys are read once, and their products with the tokens are stored together with parts of the normalizer over coarse
means. Weights of fine means follow from sums of products. Prompts: the means are stored, then normalizer and weights are separate products.
Weights give each block's best score. A threshold that the required number of scores reach gives the list.

With 16-bit queries, float32 means enter matrix instructions as sums of 16-bit parts, accurate to at least 22 bits.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import LOG2E, prefetch, row_of, wait_for_ahead

MOST = tl.constexpr(1e37)  # largest score
CEILING = tl.constexpr(80.0 * 1.4426950408889634)  # of a weight's exponent, in log2 units


@triton.jit(do_not_specialize=["T", "HK", "N"])
def add_kernel(
    p_key, p_key_sum, p_new_tokens, p_past_length, T, HK, N,
    D: tl.constexpr, DP: tl.constexpr, STRIDE: tl.constexpr, KP: tl.constexpr, SETTLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One sum of STRIDE keys with those that the call brings of it. Grid (rows that T tokens may touch, HK, B)."""
    wait_for_ahead(PDL, SETTLE)
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
def _part(b_rest, KIND: tl.constexpr):
    """The next part of numbers in the queries' type, and what is left."""
    b_part = b_rest.to(KIND)
    return b_part, b_rest - b_part.to(tl.float32)


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


@triton.jit
def _all_dense(length, count, last, DENSE: tl.constexpr, BY_CALL: tl.constexpr):
    """Whether no token of a tile chooses; its last one is at position `last`, -1 without any."""
    reach = last + 1
    if BY_CALL:
        reach = tl.where(last < 0, 0, length + count)
    return reach < DENSE


@triton.jit
def _absorb(b_max, b_sum, b_logit):
    """Logits in log2 units, -inf where there is none, into the maximum and the sum of exponentials."""
    b_new = tl.maximum(b_max, tl.max(b_logit, 1))
    return b_new, b_sum * tl.exp2(b_max - b_new) + tl.sum(tl.exp2(b_logit - b_new[:, None]), 1)


@triton.jit
def _store_part(p_part_ml, i_batch, i_split, NS, b_max, b_sum, BM: tl.constexpr):
    """To [B, HK * tiles, NS, BM, 2]."""
    i_part = (i_batch.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * NS + i_split
    o_part = (i_part * BM + tl.arange(0, BM)) * 2
    tl.store(p_part_ml + o_part, b_max)
    tl.store(p_part_ml + o_part + 1, b_sum)


@triton.jit
def _kept(p_from, o_first, end, COUNT: tl.constexpr):
    """Means of COUNT products from o_first on; those from `end` on are 0."""
    b_mean = tl.load(p_from + o_first, mask=o_first < end, other=0.0)
    for r in tl.static_range(1, COUNT):
        b_mean += tl.load(p_from + o_first + r, mask=o_first + r < end, other=0.0)
    return b_mean * (1.0 / COUNT)


@triton.jit(do_not_specialize=["T", "H", "HK", "N", "NS"])
def multiply_kernel(
    p_query, p_key_sum, p_new_tokens, p_past_length, p_product, p_part_ml, T, H, HK, N, NS, scale,
    D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr, STRIDE: tl.constexpr,
    LSE_STRIDE: tl.constexpr, LSE_LENGTH: tl.constexpr, DENSE: tl.constexpr, BY_CALL: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr,
    MEANS: tl.constexpr, MP: tl.constexpr, STAGES: tl.constexpr, SETTLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Queries times means of STRIDE keys, in log2 units; maximum and sum of exponentials over part of the coarse means.
    Grid (NS, HK * tiles, B).

    p_product: [B, HK * tiles, BM, N].
    MEANS: Coarse means that lie in the BJ sums of a tile; tiles overlap.
    """
    STEP: tl.constexpr = LSE_STRIDE // STRIDE
    i_split = tl.program_id(0)
    tiles = tl.num_programs(1) // HK
    i_kv, i_tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    i_batch = tl.program_id(2)
    o_sum = tl.arange(0, BJ)
    if PDL and SETTLE:
        # Sums of earlier calls are brought to L2 while the kernel ahead still runs; nothing is used before that has ended.
        row, start, length, count = row_of(i_batch, p_new_tokens, p_past_length, None, None, T, False)
        known = tl.where(length < DENSE, 0, tl.minimum(length // STRIDE, N))
        for s in tl.range(i_split * (MEANS * STEP), known, NS * (MEANS * STEP), num_stages=1):
            p_ahead = p_key_sum + ((row * HK + i_kv) * N + tl.minimum(s + o_sum, N - 1)) * D
            prefetch(p_ahead, 128 * tl.arange(0, max(DP // 32, 1)), SETTLE)
    wait_for_ahead(PDL, SETTLE)
    row, start, length, count = row_of(i_batch, p_new_tokens, p_past_length, None, None, T, False)
    o_dim = tl.arange(0, DP)
    b_q, o_position, last = _rows(p_query, start, 0, length, count, i_tile, i_kv, H, HK, N * STRIDE, o_dim, D, GP, BM)
    if _all_dense(length, count, last, DENSE, BY_CALL):
        return
    end = tl.minimum((last + 1) // STRIDE, N)  # sums that are complete
    p_sums = p_key_sum + (row * HK + i_kv) * N * D
    p_to = p_product + ((i_batch.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * BM + tl.arange(0, BM)) * N
    for s in tl.range(i_split * (MEANS * STEP), end, NS * (MEANS * STEP), num_stages=STAGES):
        m_sum = s + o_sum < end
        b_rest = tl.load(
            p_sums + (s + o_sum)[:, None] * D + o_dim[None, :], mask=m_sum[:, None] & (o_dim < D)[None, :], other=0.0
        ) * (1.0 / STRIDE)
        b_part, b_rest = _part(b_rest, b_q.dtype)
        b_dot = tl.dot(b_q, tl.trans(b_part), input_precision=DOT)
        for _ in tl.static_range(1, PARTS):
            b_part, b_rest = _part(b_rest, b_q.dtype)
            b_dot = tl.dot(b_q, tl.trans(b_part), b_dot, input_precision=DOT)
        tl.store(p_to[:, None] + (s + o_sum)[None, :], b_dot * (scale * LOG2E), mask=m_sum[None, :])
    # A program reads what it has written alone; where tiles overlap another one writes the same.
    tl.debug_barrier()
    o_own = tl.arange(0, MP)
    b_limit = _complete(o_position, LSE_STRIDE, LSE_LENGTH)
    b_max = tl.full([BM], -1.0e30, tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    for s in tl.range(i_split * (MEANS * STEP), end, NS * (MEANS * STEP), num_stages=1):
        o_first = tl.where(o_own < MEANS, s + o_own * STEP, end)
        b_logit = _kept(p_to[:, None], o_first[None, :], end, LSE_LENGTH // STRIDE)
        m_mean = (o_own < MEANS)[None, :] & ((s // STEP + o_own)[None, :] < b_limit[:, None])
        b_max, b_sum = _absorb(b_max, b_sum, tl.where(m_mean, b_logit, float("-inf")))
    _store_part(p_part_ml, i_batch, i_split, NS, b_max, b_sum, BM)


@triton.jit
def _store_parts(p_mean, o_mean, m_mean, b_rest, o_dim, rows, D: tl.constexpr, PARTS: tl.constexpr):
    """Means to [PARTS, rows, D]."""
    for i in tl.static_range(PARTS):
        b_part, b_rest = _part(b_rest, p_mean.dtype.element_ty)
        p_to = p_mean + rows * (D * i) + o_mean[:, None] * D + o_dim[None, :]
        tl.store(p_to, b_part, mask=m_mean[:, None] & (o_dim < D)[None, :])


@triton.jit(do_not_specialize=["T", "HK", "N", "NM", "NC"])
def mean_kernel(
    p_key_sum, p_new_tokens, p_past_length, p_mean, p_coarse, T, HK, N, NM, NC,
    D: tl.constexpr, DP: tl.constexpr, BJ: tl.constexpr, STRIDE: tl.constexpr, LENGTH: tl.constexpr,
    LSE_STRIDE: tl.constexpr, LSE_LENGTH: tl.constexpr, DENSE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Fine and coarse means that begin in BJ sums, in parts. Grid (ceil(N / BJ), HK, B).

    p_mean, p_coarse: [B, HK, PARTS, NM or NC, D]; what is not complete is written or not, and used nowhere.
    """
    STEP: tl.constexpr = LSE_STRIDE // STRIDE
    i_head, i_batch = tl.program_id(1), tl.program_id(2)
    row, _, length, count = row_of(i_batch, p_new_tokens, p_past_length, None, None, T, False)
    end = tl.minimum((length + count) // STRIDE, N)
    s = tl.program_id(0) * BJ
    if (length + count < DENSE) | (s >= end):
        return
    o_dim = tl.arange(0, DP)
    p_sums = p_key_sum + (row * HK + i_head) * N * D
    place = (i_batch.to(tl.int64) * HK + i_head) * PARTS
    o_mean = s + tl.arange(0, BJ)
    b_mean = _mean(p_sums, o_mean, end, o_dim, 1, LENGTH // STRIDE, D) * (1.0 / LENGTH)
    rows = row * 0 + NM  # of 64 bits
    _store_parts(p_mean + place * NM * D, o_mean, o_mean < end, b_mean, o_dim, rows, D, PARTS)
    o_mean = (s + STEP - 1) // STEP + tl.arange(0, BJ)
    m_mean = o_mean * STEP < tl.minimum(s + BJ, end)
    b_mean = _mean(p_sums, o_mean, tl.where(m_mean, end, 0), o_dim, STEP, LSE_LENGTH // STRIDE, D) * (1.0 / LSE_LENGTH)
    _store_parts(p_coarse + place * NC * D, o_mean, m_mean, b_mean, o_dim, rows - NM + NC, D, PARTS)


@triton.jit
def _products(b_q, p_mean, o_mean, o_dim, rows, D: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr):
    """Queries [BM, DP] times means [PARTS, rows, D], the last part first."""
    p_from = p_mean + o_mean[:, None] * D + o_dim[None, :]
    mask = (o_dim < D)[None, :]
    b_mean = tl.load(p_from + rows * (D * (PARTS - 1)), mask=mask, other=0.0)
    b_dot = tl.dot(b_q, tl.trans(b_mean), input_precision=DOT)
    for i in tl.static_range(1, PARTS):
        b_mean = tl.load(p_from + rows * (D * (PARTS - 1 - i)), mask=mask, other=0.0)
        b_dot = tl.dot(b_q, tl.trans(b_mean), b_dot, input_precision=DOT)
    return b_dot


@triton.jit(do_not_specialize=["T", "H", "HK", "N", "NC", "NS", "first"])
def normalize_kernel(
    p_query, p_coarse, p_new_tokens, p_past_length, p_part_ml, T, H, HK, N, NC, NS, scale, first,
    D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr, STRIDE: tl.constexpr,
    LSE_STRIDE: tl.constexpr, LSE_LENGTH: tl.constexpr, DENSE: tl.constexpr, BY_CALL: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr,
    STAGES: tl.constexpr,
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
    if _all_dense(length, count, last, DENSE, BY_CALL):
        return
    b_limit = _complete(o_position, LSE_STRIDE, LSE_LENGTH)
    many = _complete(last, LSE_STRIDE, LSE_LENGTH)
    size = ((many + NS - 1) // NS + BJ - 1) // BJ * BJ
    p_mean = p_coarse + (row * HK + i_kv) * PARTS * NC * D
    b_max = tl.full([BM], -1.0e30, tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    for s in tl.range(i_split * size, tl.minimum((i_split + 1) * size, many), BJ, num_stages=STAGES):
        o_mean = s + tl.arange(0, BJ)
        b_logit = _products(b_q, p_mean, o_mean, o_dim, row * 0 + NC, D, PARTS, DOT) * (scale * LOG2E)
        b_logit = tl.where(o_mean[None, :] < b_limit[:, None], b_logit, float("-inf"))
        b_max, b_sum = _absorb(b_max, b_sum, b_logit)
    _store_part(p_part_ml, i_batch, i_split, NS, b_max, b_sum, BM)


@triton.jit(do_not_specialize=["T", "H", "HK", "N", "NM", "NS", "NB", "first", "chunk"])
def score_kernel(
    p_query, p_product, p_mean, p_new_tokens, p_past_length, p_part_ml, p_best, p_tail,
    T, H, HK, N, NM, NS, NB, scale, first, chunk,
    D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr, BS: tl.constexpr,
    STRIDE: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr, DENSE: tl.constexpr, BY_CALL: tl.constexpr, PARTS: tl.constexpr,
    DOT: tl.constexpr, STAGES: tl.constexpr, KEPT: tl.constexpr, SETTLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of each block the largest weight of the means that begin in it, and of those that reach into it. Grid (splits, HK * tiles, B).

    p_best, p_tail: [B, chunk, HK, NB]; into the first none reaches.
    KEPT: Of sums products are kept.
    """
    wait_for_ahead(PDL, SETTLE)
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
    if _all_dense(length, count, last, DENSE, BY_CALL):
        return
    o_part = tl.arange(0, BS)
    p_ml = p_part_ml + (i_batch.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * NS * BM * 2
    o_ml = (o_part[None, :] * BM + tl.arange(0, BM)[:, None]) * 2
    b_most = tl.load(p_ml + o_ml, mask=(o_part < NS)[None, :], other=-1.0e30)
    b_sums = tl.load(p_ml + o_ml + 1, mask=(o_part < NS)[None, :], other=0.0)
    b_max = tl.max(b_most, 1)
    b_total = b_max + tl.log2(tl.sum(b_sums * tl.exp2(b_most - b_max[:, None]), 1))
    end = tl.minimum((last + 1) // STRIDE, N)
    if KEPT:
        i_row = (i_batch.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * BM + tl.arange(0, BM)
        p_from = (p_product + i_row * N)[:, None]
    else:
        p_from = p_mean + (row * HK + i_kv) * PARTS * NM * D
    b_limit = tl.where(tl.arange(0, BM) % GP < H // HK, _complete(o_position, STRIDE, LENGTH), 0)
    many = last // BLOCK * PER  # means that begin before the last token's own block
    size = ((many + splits - 1) // splits + BJ - 1) // BJ * BJ
    o_token = i_tile * (BM // GP) + tl.arange(0, BM // GP)  # of the chunk
    p_to = ((i_batch.to(tl.int64) * chunk + o_token) * HK + i_kv)[:, None] * NB
    o_per = tl.arange(0, PER)[None, None, :]
    for s in tl.range(i_split * size, tl.minimum((i_split + 1) * size, many), BJ, num_stages=STAGES):
        o_mean = s + tl.arange(0, BJ)
        if KEPT:
            b_logit = _kept(p_from, o_mean[None, :], end, LENGTH // STRIDE)
        else:
            b_logit = _products(b_q, p_from, o_mean, o_dim, row * 0 + NM, D, PARTS, DOT) * (scale * LOG2E)
        b_share = tl.exp2(tl.minimum(b_logit - b_total[:, None], CEILING))
        b_share = tl.where(o_mean[None, :] < b_limit[:, None], b_share, 0.0)
        b_share = tl.sum(tl.reshape(b_share, [BM // GP, GP, BJ]), 1)
        b_share = tl.reshape(tl.minimum(b_share, MOST), [BM // GP, BJ // PER, PER])
        b_tail = tl.where(o_per >= PER + 1 - LENGTH // STRIDE, b_share, 0.0)
        o_block = s // PER + tl.arange(0, BJ // PER)
        m_token = (first + o_token < count)[:, None] & (o_token < chunk)[:, None]
        p_block = p_to + o_block[None, :]
        tl.store(p_best + p_block, tl.max(b_share, 2), mask=m_token & (o_block < NB)[None, :])
        tl.store(p_tail + p_block + 1, tl.max(b_tail, 2), mask=m_token & (o_block + 1 < NB)[None, :])


@triton.jit
def _scores(p_best, p_tail, o_block, end, INIT: tl.constexpr):
    """Blocks' scores as integers of the same order; -1 before INIT and from `end` on."""
    m_load = o_block < (end + 3) // 4 * 4  # four at a time: rows have room for that
    b_best = tl.load(p_best + o_block, mask=m_load, other=0.0)
    b_tail = tl.load(p_tail + o_block, mask=m_load, other=0.0)
    if INIT == 0:
        b_tail = tl.where(o_block > 0, b_tail, 0.0)
    b_bits = tl.maximum(b_best, b_tail).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where((o_block >= INIT) & (o_block < end), b_bits, -1)


@triton.jit
def _take(p_best, p_tail, p_to, end, take, BC: tl.constexpr, INIT: tl.constexpr):
    """Write the `take` best of the blocks INIT .. end - 1 to slots INIT and on, ascending; the slot behind them."""
    o_block = tl.arange(0, BC)
    b_score = _scores(p_best, p_tail, o_block, end, INIT)
    # Bit by bit the largest number that `take` scores reach at least; it is good enough once no more do.
    least, bit = take * 0, take * 0 + (1 << 30)
    many, above = (
        end - INIT,
        take * 0,
    )  # scores of at least this number, and of more than that, where it has all its bits
    while (many > take) & (bit > 0):
        b_more = (b_score >= least + bit).to(tl.int32)
        for s in range(BC, end, BC):
            b_more += (_scores(p_best, p_tail, s + o_block, end, INIT) >= least + bit).to(tl.int32)
        more = tl.sum(b_more, 0)
        reached = more >= take
        least, many = tl.where(reached, least + bit, least), tl.where(reached, more, many)
        above = tl.where(reached, above, more)
        bit = bit >> 1
    at, equal = INIT + take * 0, take * 0
    for s in range(0, end, BC):
        m_take = b_score >= least
        if many > take:  # of equal ones the first
            b_equal = (b_score == least).to(tl.int32)
            m_take &= (b_equal == 0) | (above + equal + tl.cumsum(b_equal, 0) <= take)
            equal += tl.sum(b_equal, 0)
        b_take = m_take.to(tl.int32)
        tl.store(p_to + at + tl.cumsum(b_take, 0) - 1, s + o_block, mask=m_take)
        at += tl.sum(b_take, 0)
        b_score = _scores(p_best, p_tail, s + BC + o_block, end, INIT)
    return at


@triton.jit(do_not_specialize=["T", "HK", "NB", "S", "first", "chunk"])
def choose_kernel(
    p_new_tokens, p_past_length, p_best, p_tail, p_blocks, T, HK, NB, S, first, chunk,
    BC: tl.constexpr, SP: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    DENSE: tl.constexpr, BY_CALL: tl.constexpr, SETTLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The list of one token: what is chosen always, and between it the blocks of the best scores, ascending. Grid (chunk, HK, B)."""
    wait_for_ahead(PDL, SETTLE)
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
    if _all_dense(length, count, length + token, DENSE, BY_CALL) | (open_blocks == 0):
        tl.store(p_to + o_slot, tl.where(o_slot <= own, o_slot, -1), mask=o_slot < S)
        return
    tl.store(p_to + o_slot, o_slot, mask=o_slot < INIT)
    at = INIT
    if TOP > INIT + LOCAL + 1:
        NB = NB // 4 * 4  # which tells the compiler
        p_from = ((i_batch.to(tl.int64) * chunk + i_token) * HK + i_head) * NB
        take = tl.minimum(TOP - (own + 1 - open_blocks), open_blocks)
        at = _take(p_best + p_from, p_tail + p_from, p_to, tl.minimum(end, NB), take, BC, INIT)
    # The blocks before the token's own; -1 behind them.
    o_near = own - LOCAL + o_slot
    tl.store(p_to + at + o_slot, tl.where(o_near <= own, o_near, -1), mask=at + o_slot < S)


FUNCTIONS = {
    "add": add_kernel,
    "multiply": multiply_kernel,
    "mean": mean_kernel,
    "normalize": normalize_kernel,
    "score": score_kernel,
    "choose": choose_kernel,
    "score_few": score_kernel,
    "choose_few": choose_kernel,
}
