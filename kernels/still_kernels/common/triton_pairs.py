"""Sorts (token, matrix) pairs by matrix, on the device. Nothing is read back."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

SORTED = tl.constexpr(16)  # pairs, counts or blocks that a sorting program reads per step


@triton.jit
def matrix_of(p_expert, o_pair, m_pair, E):
    """Where pairs go; within the matrices, as a TensorRT builder times kernels on garbage."""
    return tl.minimum(tl.maximum(tl.load(p_expert + o_pair, mask=m_pair, other=0), 0), E - 1)


@triton.jit(do_not_specialize=["P", "E"])
def count_kernel(p_expert, p_counts, P, E, BP: tl.constexpr, EP: tl.constexpr):
    """How many of BP pairs go to each matrix, p_counts [ceil(P / BP), E]. Grid (ceil(P / BP))."""
    first = tl.program_id(0) * BP
    o_expert = tl.arange(0, EP)
    b_count = tl.zeros([EP], tl.int32)
    for begin in range(0, BP, SORTED):
        o_pair = first + begin + tl.arange(0, SORTED)
        b_expert = matrix_of(p_expert, o_pair, o_pair < P, E)
        b_count += tl.sum(((b_expert[:, None] == o_expert[None, :]) & (o_pair < P)[:, None]).to(tl.int32), 0)
    tl.store(p_counts + tl.program_id(0) * E + o_expert, b_count, mask=o_expert < E)


@triton.jit(do_not_specialize=["E", "counted", "NB", "rows"])
def offsets_kernel(p_counts, p_firsts, p_blocks, E, counted, NB, rows, EP: tl.constexpr):
    """p_counts [counted, E] become those of the pairs in front, p_firsts [E] the place of a matrix's first pair, and p_blocks [NB, 3]
    the matrix of each block, its first place and the matrix's last. Grid (1)."""
    o_expert = tl.arange(0, EP)
    m_expert = o_expert < E
    b_total = tl.zeros([EP], tl.int32)
    for begin in range(0, counted, SORTED):
        o_part = begin + tl.arange(0, SORTED)
        p_count = p_counts + o_part[:, None] * E + o_expert[None, :]
        m_count = (o_part < counted)[:, None] & m_expert[None, :]
        b_count = tl.load(p_count, mask=m_count, other=0)
        tl.store(p_count, b_total[None, :] + tl.cumsum(b_count, 0) - b_count, mask=m_count)
        b_total += tl.sum(b_count, 0)
    b_last = tl.cumsum(b_total, 0)
    b_first = b_last - b_total
    tl.store(p_firsts + o_expert, b_first, mask=m_expert)
    b_blocks = (b_total + rows - 1) // rows
    b_behind = tl.cumsum(b_blocks, 0)
    b_before = (b_behind - b_blocks)[None, :]
    for begin in range(0, NB, SORTED):
        o_block = begin + tl.arange(0, SORTED)
        m_mine = (b_before <= o_block[:, None]) & (o_block[:, None] < b_behind[None, :])
        p_block = p_blocks + o_block * 3
        b_start = b_first[None, :] + (o_block[:, None] - b_before) * rows
        tl.store(p_block, tl.sum(tl.where(m_mine, o_expert[None, :], 0), 1), mask=o_block < NB)
        tl.store(p_block + 1, tl.sum(tl.where(m_mine, b_start, 0), 1), mask=o_block < NB)
        tl.store(p_block + 2, tl.sum(tl.where(m_mine, b_last[None, :], 0), 1), mask=o_block < NB)


@triton.jit(do_not_specialize=["P", "E"])
def sort_kernel(p_expert, p_counts, p_firsts, p_order, P, E, BP: tl.constexpr):
    """Pairs in the order of their matrices, p_order [P]. Grid (ceil(P / BP))."""
    first = tl.program_id(0) * BP
    o_pair = first + tl.arange(0, BP)
    m_pair = o_pair < P
    b_expert = matrix_of(p_expert, o_pair, m_pair, E)
    b_place = tl.load(p_firsts + b_expert, mask=m_pair, other=0)
    b_place += tl.load(p_counts + tl.program_id(0) * E + b_expert, mask=m_pair, other=0)
    for begin in range(0, BP, SORTED):
        o_other = first + begin + tl.arange(0, SORTED)
        b_other = matrix_of(p_expert, o_other, o_other < P, E)
        m_before = (b_other[None, :] == b_expert[:, None]) & (o_other[None, :] < o_pair[:, None])
        b_place += tl.sum(m_before.to(tl.int32), 1)
    tl.store(p_order + b_place, o_pair, mask=m_pair)
