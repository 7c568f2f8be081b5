"""First step of a prompt: what a chunk of tokens computes without the state, all chunks at once.

Between two tokens stands the product of their query (or key) and key under the decay between them: `scores`, the output's part from the
chunk itself, and A = beta * key * key below the diagonal, whose (I + A)^-1 the delta rules need. Exponents are sums of decays, at most
0. With a decay per key the pairs are taken by blocks of 1, 2, 4 .. tokens: a pair in neighbouring blocks decays up to the border between
them and from it on, which are factors of key and query.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.linear_attention.triton_common import (
    EXACT,
    load_rows,
    log_decay_of_heads,
    log_decay_of_keys,
)
from still_kernels.triton_shared import row_of


@triton.jit
def between_halves(o_row, o_column, level):
    """Where row and column lie in the second and the first half of one pair of blocks of 2^level."""
    return (o_row >> (level + 1) == o_column >> (level + 1)) & (o_row >> level > o_column >> level)


@triton.jit
def up_to_border(o_row, o_column, level):
    """Where column lies between row and the border in its pair of blocks of 2^level: what decays from it on, or to it."""
    behind = ((o_row >> (level + 1)) * 2 + 1) << level  # the second half's first
    return (o_column >= tl.minimum(o_row + 1, behind)) & (o_column <= tl.maximum(o_row, behind - 1))


@triton.jit
def inverse_of_unit(b_a, C: tl.constexpr, LEVELS: tl.constexpr, SOLVE: tl.constexpr):
    """(I + A)^-1 [C, C] of A strictly below the diagonal, C = 2^LEVELS: blocks of 1, 2, 4 .. joined, X21 = -X22 A21 X11.

    A power series of A, which takes as many products, loses all digits where keys are alike.
    """
    o_row = tl.arange(0, C)[:, None]
    o_column = tl.arange(0, C)[None, :]
    b_x = tl.where(o_row == o_column, 1.0, 0.0) - tl.where(between_halves(o_row, o_column, 0), b_a, 0.0)
    for level in tl.range(1, LEVELS, num_stages=1):
        b_between = tl.where(between_halves(o_row, o_column, level), b_a, 0.0)
        b_x -= tl.dot(tl.dot(b_x, b_between, input_precision=SOLVE), b_x, input_precision=SOLVE)
    return b_x


@triton.jit
def sums_of_rows(m_part, b_decay):
    """[C, DP]: row i the sum of the rows of b_decay [C, DP] that m_part [C, C] names."""
    return tl.dot(tl.where(m_part, 1.0, 0.0), b_decay, input_precision=EXACT)


@triton.jit(do_not_specialize=["T", "H", "HQ", "HK", "W", "first", "n_chunks"])
def prepare_kernel(
    p_query,
    p_key,
    p_decay,
    p_beta,
    p_new_tokens,
    p_query_start,
    p_state_row,
    p_scores,
    p_inverse,
    p_left,
    p_rest,
    p_asked,
    p_taken,
    p_added,
    T,
    H,
    HQ,
    HK,
    W,
    first,
    n_chunks,
    scale,
    D: tl.constexpr,
    DP: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
    RAGGED: tl.constexpr,
    DOT: tl.constexpr,
    SOLVE: tl.constexpr,
):
    """Chunk `first` + i of one head, C = 2^LEVELS tokens. DECAY 0: none, 1: per head, 2: per key. Grid (n_chunks, H, B).

    scores [.., G, C, C], scaled; inverse [.., C, C], its columns times beta; with a decay per head left, rest [.., C]; per key asked
    [.., G, C, D], taken, added [.., C, D] and left [.., D]; one of each for row, chunk and head.
    """
    i_chunk = tl.program_id(0)
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    _row, start, _length, count = row_of(i_batch, p_new_tokens, None, p_query_start, p_state_row, T, RAGGED)
    begin = (first + i_chunk) * C
    if begin >= count:
        return
    i_tile = (i_batch.to(tl.int64) * n_chunks + i_chunk) * H + i_head
    o_dim = tl.arange(0, DP)
    o_inner = tl.arange(0, C)
    o_row = o_inner[:, None]
    o_column = o_inner[None, :]
    o_token = begin + o_inner
    m_token = o_token < count
    o_square = o_row * C + o_column
    o_keys = o_row * D + o_dim[None, :]
    m_dim = (o_dim < D)[None, :]
    KIND: tl.constexpr = p_key.dtype.element_ty
    p_query += (start * HQ + i_head // (H // HQ)) * G * D
    b_key = load_rows(p_key + (start * HK + i_head // (H // HK)) * D, o_token, m_token, HK * D, o_dim, D)
    if DECAY == 1:
        p_decay += start * H + i_head
        b_decay = log_decay_of_heads(p_decay, o_token, m_token, H)
        b_next = log_decay_of_heads(p_decay, o_token + 1, (o_inner + 1 < C) & (o_token + 1 < count), H)
        tl.store(p_left + i_tile * C + o_inner, tl.exp(tl.cumsum(b_decay, 0)))
        tl.store(p_rest + i_tile * C + o_inner, tl.exp(tl.cumsum(b_next, 0, reverse=True)))
        b_factor = tl.exp(tl.cumsum(tl.where(o_row > o_column, b_decay[:, None], 0.0), 0))
    if DECAY == 2:
        b_decay = log_decay_of_keys(p_decay + (start * H + i_head) * D, o_token, m_token, H * D, o_dim, D)
        b_left = tl.exp(sums_of_rows(o_column <= o_row, b_decay))
        if DELTA:
            tl.store(p_taken + i_tile * (C * D) + o_keys, (b_key.to(tl.float32) * b_left).to(KIND), mask=m_dim)
        for g in range(G):
            b_query = load_rows(p_query + g * D, o_token, m_token, HQ * G * D, o_dim, D)
            p_tile = p_asked + (i_tile * G + g) * (C * D) + o_keys
            tl.store(p_tile, (b_query.to(tl.float32) * b_left).to(KIND), mask=m_dim)
        b_rest = tl.exp(sums_of_rows(o_column > o_row, b_decay))
        tl.store(p_added + i_tile * (C * D) + o_keys, (b_key.to(tl.float32) * b_rest).to(KIND), mask=m_dim)
        tl.store(p_left + i_tile * D + o_dim, tl.exp(tl.sum(b_decay, 0)), mask=o_dim < D)
    for g in tl.static_range(G):
        b_query = load_rows(p_query + g * D, o_token, m_token, HQ * G * D, o_dim, D)
        if DECAY < 2:
            b_score = tl.dot(b_query, tl.trans(b_key), input_precision=DOT)
            if DECAY == 1:
                b_score *= b_factor
        else:
            b_same = tl.sum(b_query.to(tl.float32) * b_key.to(tl.float32), 1)
            b_score = tl.where(o_row == o_column, b_same[:, None], 0.0)
            b_products = tl.zeros([C, C], tl.float32)  # of keys
            for level in tl.range(0, LEVELS, num_stages=1):
                m_level = between_halves(o_row, o_column, level)
                b_border = tl.exp(sums_of_rows(up_to_border(o_row, o_column, level), b_decay))
                b_left_key = (b_key.to(tl.float32) * b_border).to(KIND)
                b_asked = (b_query.to(tl.float32) * b_border).to(KIND)
                b_score += tl.where(m_level, tl.dot(b_asked, tl.trans(b_left_key), input_precision=DOT), 0.0)
                if DELTA and g == 0:
                    b_both = tl.dot(b_left_key, tl.trans(b_left_key), input_precision=DOT)
                    b_products += tl.where(m_level, b_both, 0.0)
        b_score = tl.where(o_row >= o_column, b_score * scale, 0.0)
        tl.store(p_scores + (i_tile * G + g) * (C * C) + o_square, b_score.to(KIND))
    if DELTA:
        p_beta += start * W + tl.where(W > 1, i_head, 0) + o_token.to(tl.int64) * W
        b_beta = tl.load(p_beta, mask=m_token, other=0.0)
        if DECAY < 2:
            b_products = tl.dot(b_key, tl.trans(b_key), input_precision=DOT)
            if DECAY == 1:
                b_products *= b_factor
        b_a = tl.where(o_row > o_column, b_products * b_beta[:, None], 0.0)
        b_inverse = inverse_of_unit(b_a, C, LEVELS, SOLVE) * b_beta[None, :]
        tl.store(p_inverse + i_tile * (C * C) + o_square, b_inverse)
