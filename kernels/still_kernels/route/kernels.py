"""Scores of experts, and the experts of each token."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_gemm import gemm_block
from still_kernels.common.triton_shared import ranked

LEAST = tl.constexpr(-(1 << 63))  # below the rank of every number
PLACE = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["M", "N", "K"])
def scores_kernel(p_input, p_router, p_logits, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
                  ALIGNED: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """p_logits [M, N] of p_input [M, K] and p_router [N, K]. Grid (ceil(M / BM) * ceil(N / BN))."""
    if ALIGNED:
        K = K // 8 * 8  # which tells the compiler
    blocks = tl.cdiv(N, BN)
    o_row = tl.program_id(0) // blocks * BM + tl.arange(0, BM)
    o_expert = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    gemm_block(
        p_input, None, p_router, None, p_logits, o_row, o_expert, M, N, K, BM, BN, BK, STAGES, False, EXACT=EXACT
    )  # fmt: skip


@triton.jit
def _of_best_groups(b_order, b_rank, o_expert, m_expert, size, groups, top_groups):
    """b_order of the experts in the groups whose two best have the largest sum; of others LEAST."""
    b_sum = tl.full(b_rank.shape, float("-inf"), tl.float32)
    b_group = o_expert // size
    for group in range(0, groups):
        b_mine = tl.where(m_expert & (b_group == group), b_order, LEAST)
        best = tl.max(b_mine, 0)
        second = tl.max(tl.where(b_mine == best, LEAST, b_mine), 0)
        m_best = m_expert & ((b_mine == best) | (b_mine == second))
        b_sum = tl.where(b_group == group, tl.sum(tl.where(m_best & (b_mine > LEAST), b_rank, 0.0), 0), b_sum)
    b_left = tl.where(m_expert, ranked(b_sum, o_expert), LEAST)
    m_kept = o_expert < 0
    for _ in range(0, top_groups):
        taken = ((tl.max(b_left, 0) & PLACE) ^ PLACE).to(tl.int32) // size
        m_kept |= b_group == taken
        b_left = tl.where(b_group == taken, LEAST, b_left)
    return tl.where(m_kept, b_order, LEAST)


@triton.jit(do_not_specialize=["N", "k", "normalize", "groups", "top_groups"])
def choose_kernel(p_logits, p_bias, p_expert, p_weight, N, k, normalize, groups, top_groups, epsilon, scaling, EP: tl.constexpr,
                  KP: tl.constexpr, SIGMOID: tl.constexpr, GROUPED: tl.constexpr):  # fmt: skip
    """p_expert and p_weight [M, k] of p_logits [M, N]. Grid (M)."""
    i_row = tl.program_id(0).to(tl.int64)
    o_expert = tl.arange(0, EP)
    m_expert = o_expert < N
    b_logit = tl.load(p_logits + i_row * N + o_expert, mask=m_expert, other=float("-inf"))
    if SIGMOID:
        b_score = 1 / (1 + tl.exp(-b_logit))
    else:
        b_score = tl.exp(b_logit - tl.max(b_logit, 0))
        b_score = b_score / tl.sum(b_score, 0)
    b_rank = b_score
    if p_bias is not None:
        b_rank += tl.load(p_bias + o_expert, mask=m_expert, other=0.0)
    b_order = tl.where(m_expert, ranked(b_rank, o_expert), LEAST)
    if GROUPED:
        b_order = _of_best_groups(b_order, b_rank, o_expert, m_expert, N // groups, groups, top_groups)
    o_chosen = tl.arange(0, KP)
    b_chosen = tl.zeros([KP], tl.int32)
    b_weight = tl.zeros([KP], tl.float32)
    for i in range(0, k):
        expert = ((tl.max(b_order, 0) & PLACE) ^ PLACE).to(tl.int32)
        b_chosen = tl.where(o_chosen == i, expert, b_chosen)
        b_weight = tl.where(o_chosen == i, tl.sum(tl.where(o_expert == expert, b_score, 0.0), 0), b_weight)
        b_order = tl.where(o_expert == expert, LEAST, b_order)
    if normalize != 0:
        b_weight = b_weight / (tl.sum(b_weight, 0) + epsilon)
    tl.store(p_expert + i_row * k + o_chosen, b_chosen, mask=o_chosen < k)
    tl.store(p_weight + i_row * k + o_chosen, b_weight * scaling, mask=o_chosen < k)


FUNCTIONS = {"few_scores": scores_kernel, "scores": scores_kernel, "choose": choose_kernel}
