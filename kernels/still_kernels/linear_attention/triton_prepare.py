"""First step of a prompt: values of a chunk that do not depend on the state, for all chunks at once.

A pair of tokens has the product of their keys under the decay between them: A = beta * key * key below the diagonal, whose (I + A)^-1 the
delta rules need. Exponents are sums of decays, at most 0. With a decay per key channel, the pairs, and the pairs of query and key (`scores`
of the outputs), are computed by blocks of 1, 2, 4 .. tokens. A pair in neighbouring blocks decays up to the border between them and then
from it: factors of key and query. Sums of neighbouring blocks form those of the next size.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import ROWS, rounded, row_of
from still_kernels.linear_attention.triton_common import (
    EXACT,
    decay_between,
    gemm_of_halves,
    halves,
    load_rows,
    log_decay_of_heads,
    log_decay_of_keys,
    sums_of_decay,
)


@triton.jit
def between_halves(o_row, o_column, level):
    """Where row and column lie in the second and the first half of one pair of blocks of 2^level, or the other way round."""
    return (o_row ^ o_column) >> level == 1


@triton.jit
def inverse_of_unit(b_a, C: tl.constexpr, LEVELS: tl.constexpr, WIDE: tl.constexpr):
    """(I + A)^-1 [C, C] of A strictly below the diagonal, C = 2^LEVELS: blocks of 1, 2, 4 .. joined, X21 = -X22 A21 X11.

    X A X has these products in place, and others, as X has no blocks but those on the diagonal. A power series of A, which takes as many
    products, loses all digits where keys are alike. 16 bits of the factors (not WIDE) are enough for float16; tf32 takes 11.
    """
    o_row = tl.arange(0, C)[:, None]
    o_column = tl.arange(0, C)[None, :]
    b_x = tl.where(o_row == o_column, 1.0, 0.0) - tl.where(between_halves(o_row, o_column, 0), b_a, 0.0)
    if not WIDE:
        b_high, b_low = halves(b_a)
    for level in tl.range(1, LEVELS, num_stages=1):
        if WIDE:
            b_joined = tl.dot(tl.dot(b_x, b_a, input_precision=EXACT), b_x, input_precision=EXACT)
        else:
            b_x_high, b_x_low = halves(b_x)
            b_y_high, b_y_low = halves(gemm_of_halves(b_x_high, b_x_low, b_high, b_low))
            b_joined = gemm_of_halves(b_y_high, b_y_low, b_x_high, b_x_low)
        b_x -= tl.where(between_halves(o_row, o_column, level), b_joined, 0.0)
    return b_x


@triton.jit(do_not_specialize=["T", "H", "HQ", "HK", "W", "first", "n_chunks"], do_not_specialize_on_alignment=ROWS)
def prepare_kernel(
    p_query, p_key, p_decay, p_beta, p_new_tokens, p_query_start, p_state_row, p_scores, p_inverse, p_left, p_rest, p_asked,
    p_taken, p_added,
    T, H, HQ, HK, W, first, n_chunks, scale,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BD: tl.constexpr,
    DELTA: tl.constexpr, DECAY: tl.constexpr, RAGGED: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Chunk `first` + i of one head, C = 2^LEVELS tokens. DECAY 0: none, 1: per head, 2: per key, BD at a time. Grid (n_chunks, H, B).

    inverse [.., 1, C, C], its columns times beta, or its `halves` [.., 2, C, C] (not WIDE); with a decay per head left, rest [.., C]; per
    key scores [.., G, C, C], scaled, asked [.., G, C, D], taken, added [.., C, D] and left [.., D]; one of each for row, chunk and head.
    """
    i_chunk = tl.program_id(0)
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    _row, start, _length, count = row_of(i_batch, p_new_tokens, None, p_query_start, p_state_row, T, RAGGED)
    begin = (first + i_chunk) * C
    if begin >= count:
        return
    i_tile = (i_batch.to(tl.int64) * n_chunks + i_chunk) * H + i_head
    o_inner = tl.arange(0, C)
    o_row = o_inner[:, None]
    o_column = o_inner[None, :]
    o_token = begin + o_inner
    m_token = o_token < count
    o_square = o_row * C + o_column
    KIND: tl.constexpr = p_key.dtype.element_ty
    p_query += (start * HQ + i_head // (H // HQ)) * G * D
    p_key += (start * HK + i_head // (H // HK)) * D
    if DECAY == 2:
        p_decay += (start * H + i_head) * D
    if DECAY == 1:
        p_decay += start * H + i_head
        b_decay = log_decay_of_heads(p_decay, begin, count, H, o_inner)
        b_high, b_low, b_behind = sums_of_decay(b_decay)
        tl.store(p_left + i_tile * C + o_inner, tl.exp(b_high))
        tl.store(p_rest + i_tile * C + o_inner, tl.exp(b_behind))
    for g in tl.static_range(G if DECAY == 2 else 0):
        b_score = tl.zeros([C, C], tl.float32)
        if DELTA and g == 0:
            b_products = tl.zeros([C, C], tl.float32)  # of keys
        for at in tl.range(0, DP, BD, num_stages=1):
            o_part = at + tl.arange(0, BD)
            m_part = (o_part < D)[None, :]
            o_keys = o_row * D + o_part[None, :]
            b_key = load_rows(p_key, begin, count, HK * D, o_inner, o_part, D)
            b_query = load_rows(p_query + g * D, begin, count, HQ * G * D, o_inner, o_part, D)
            b_decay = log_decay_of_keys(p_decay, begin, count, H * D, o_inner, o_part, D)
            b_same = tl.sum(rounded(b_query.to(tl.float32), b_key.to(tl.float32)), 1)
            b_score += tl.where(o_row == o_column, b_same[:, None], 0.0)
            b_until = b_decay  # sums over a token's block, up to it and behind it
            b_behind = tl.zeros([C, BD], tl.float32)
            for level in tl.range(0, LEVELS, num_stages=1):
                b_level = tl.where(between_halves(o_row, o_column, level), 1.0, 0.0)
                m_second = (o_row >> level) & 1 == 1
                b_border = tl.exp(tl.where(m_second, b_until, b_behind))
                b_left_key = (b_key.to(tl.float32) * b_border).to(KIND)
                b_asked = (b_query.to(tl.float32) * b_border).to(KIND)
                b_score += b_level * tl.dot(b_asked, tl.trans(b_left_key), input_precision=DOT)
                if DELTA and g == 0:
                    b_products += b_level * tl.dot(b_left_key, tl.trans(b_left_key), input_precision=DOT)
                o_other = tl.broadcast_to(o_row ^ (1 << level), (C, BD))
                b_other = tl.gather(b_until + b_behind, o_other, 0)  # the sum over the pair's other block
                b_until += b_other * tl.where(m_second, 1.0, 0.0)
                b_behind += b_other * tl.where(m_second, 0.0, 1.0)
            b_left = tl.exp(b_until)
            p_tile = p_asked + (i_tile * G + g) * (C * D) + o_keys
            tl.store(p_tile, (b_query.to(tl.float32) * b_left).to(KIND), mask=m_part)
            if g == 0:
                if DELTA:
                    b_taken = b_key.to(tl.float32) * b_left
                    tl.store(p_taken + i_tile * (C * D) + o_keys, b_taken.to(KIND), mask=m_part)
                b_added = b_key.to(tl.float32) * tl.exp(b_behind)
                tl.store(p_added + i_tile * (C * D) + o_keys, b_added.to(KIND), mask=m_part)
                tl.store(p_left + i_tile * D + o_part, tl.exp(tl.sum(b_decay, 0)), mask=o_part < D)
        b_score = tl.where(o_row >= o_column, b_score * scale, 0.0)
        tl.store(p_scores + (i_tile * G + g) * (C * C) + o_square, b_score.to(KIND))
    if DELTA:
        p_beta += start * W + tl.where(W > 1, i_head, 0) + o_token.to(tl.int64) * W
        b_beta = tl.load(p_beta, mask=m_token, other=0.0)
        if DECAY < 2:
            b_key = load_rows(p_key, begin, count, HK * D, o_inner, tl.arange(0, DP), D)
            b_products = tl.dot(b_key, tl.trans(b_key), input_precision=DOT)
            if DECAY == 1:
                b_products *= decay_between(b_high, b_low)
        b_a = tl.where(o_row > o_column, b_products * b_beta[:, None], 0.0)
        b_inverse = inverse_of_unit(b_a, C, LEVELS, WIDE) * b_beta[None, :]
        if WIDE:
            tl.store(p_inverse + i_tile * (C * C) + o_square, b_inverse)
        else:
            b_high, b_low = halves(b_inverse)
            tl.store(p_inverse + i_tile * (2 * C * C) + o_square, b_high)
            tl.store(p_inverse + i_tile * (2 * C * C) + C * C + o_square, b_low)
