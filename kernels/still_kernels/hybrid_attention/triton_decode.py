"""One token per row in one launch: salient splits, parts of the window and slices of S, merged by the last to arrive.

Programs of one select head (GR query heads) share a counter. Every program writes its partial result, then counts itself; the
last one merges all partials of the group against the true maximum. The counters are zero between launches, so the launch can
be captured in a CUDA graph. What a step costs beyond its bytes is a chain of dependent loads, so each role issues its loads
together and reduces as little as it can.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.hybrid_attention.triton_common import LOG2E, row_of
from still_kernels.hybrid_attention.triton_decode_roles import (
    FAR,
    fresh_part,
    linear_slice,
    salient_group,
    salient_one,
    window_part,
)


@triton.jit
def _merge(
    i_row, i_token, i_head, i_state, length, K, N, parts, epsilon, p_part_acc, p_part_ml, p_part_lin, p_part_den,
    p_part_window, p_gate, p_window_factor, p_window_score, p_output, C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BS: tl.constexpr, WP: tl.constexpr, RELEASED: tl.constexpr, GATE: tl.constexpr, FACTOR: tl.constexpr,
    OVERFLOW: tl.constexpr,
):  # fmt: skip
    """Combine the partials of one query head against their global maximum, add the linear part, store output and score.

    i_row, i_token, i_head, i_state: The head's row of the workspace, of the activations, its number, its row of the scores.
    """
    MP: tl.constexpr = 64  # more than the parts can be
    o_dim = tl.arange(0, DP)
    m_dim = o_dim < D
    b_linear = tl.load(p_part_lin + i_row * D + o_dim, mask=m_dim, other=0.0)
    den = tl.load(p_part_den + i_row)
    if GATE:
        b_linear = b_linear * tl.load(p_gate + i_token * D + o_dim, mask=m_dim, other=0.0).to(tl.float32)
    # Score of the token from the window parts.
    p_window = p_part_window + i_row * (4 * WP)
    o_window = 4 * tl.arange(0, WP)
    b_others = tl.load(p_window + o_window)
    most = tl.max(b_others, 0)
    rest = tl.sum(tl.load(p_window + o_window + 1) * tl.exp2(b_others - most), 0)
    score = (tl.load(p_window + 2) - most - tl.log2(rest)) / LOG2E
    if RELEASED:
        score = tl.load(p_window + 3)
    score = tl.where(length == 0, float("inf"), score)
    tl.store(p_window_score + i_state * (2 * C) + (length & (2 * C - 1)), score)

    # The global maximum first; then the accumulators only have to be weighted and added.
    o_all = i_row * parts + tl.arange(0, MP)
    m_all = tl.arange(0, MP) < parts
    b_all = tl.load(p_part_ml + o_all * 2, mask=m_all, other=FAR)
    top = tl.max(b_all, 0)
    total = tl.sum(tl.load(p_part_ml + o_all * 2 + 1, mask=m_all, other=0.0) * tl.exp2(b_all - top), 0)
    b_acc = tl.zeros([BS, DP], tl.float32)
    for s in range(0, parts, BS):
        m_block = s + tl.arange(0, BS) < parts
        o_block = i_row * parts + s + tl.arange(0, BS)
        b_weight = tl.exp2(tl.load(p_part_ml + o_block * 2, mask=m_block, other=FAR) - top)
        p_acc = p_part_acc + o_block[:, None] * D + o_dim[None, :]
        b_acc += tl.load(p_acc, mask=m_block[:, None] & m_dim[None, :], other=0.0) * b_weight[:, None]
    b_out = tl.sum(b_acc, 0)
    if FACTOR:
        factor = tl.load(p_window_factor + i_head)
        total = total * factor
        b_out = b_out * factor
    b_out = (b_out + b_linear) / (total + den + epsilon)
    if OVERFLOW == 0:  # beyond the capacity: the caller should have refused
        b_out = tl.where(tl.maximum(length // C - 1, 0) * K > N, float("nan"), b_out)
    tl.store(p_output + i_token * D + o_dim, b_out.to(p_output.dtype.element_ty), mask=m_dim)


@triton.jit
def _commit_token(
    p_key, p_value, p_window_key, p_window_value, row, start, length, HK, C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write the token's key and value into the ring once the promoted chunk has been read."""
    BW: tl.constexpr = 1024
    slot = length & (2 * C - 1)
    for s in range(0, HK * D, BW):
        o_flat = s + tl.arange(0, BW)
        m_flat = o_flat < HK * D
        o_to = ((row * HK + o_flat // D) * (2 * C) + slot) * D + o_flat % D
        b_key = tl.load(p_key + start * HK * D + o_flat, mask=m_flat, other=0.0)
        b_value = tl.load(p_value + start * HK * D + o_flat, mask=m_flat, other=0.0)
        tl.store(p_window_key + o_to, b_key, mask=m_flat)
        tl.store(p_window_value + o_to, b_value, mask=m_flat)


@triton.jit(do_not_specialize=["H", "HK", "K", "N", "W_HEADS", "NS", "phantom"])
def decode_kernel(
    p_query,
    p_key,
    p_value,
    p_gate,
    p_feature_q_weight,
    p_feature_k_weight,
    p_window_factor,
    p_window_key,
    p_window_value,
    p_window_score,
    p_salient_key,
    p_salient_value,
    p_kv_state,
    p_z_state,
    p_new_tokens,
    p_past_length,
    p_query_start,
    p_state_row,
    p_part_acc,
    p_part_ml,
    p_part_lin,
    p_part_den,
    p_part_window,
    p_counters,
    p_output,
    p_present_length,
    H,
    HK,
    K,
    N,
    W_HEADS,
    NS,
    phantom,
    scale,
    epsilon,
    C: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DK: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,
    KP: tl.constexpr,
    GP: tl.constexpr,
    DS: tl.constexpr,
    BN: tl.constexpr,
    BL: tl.constexpr,
    BS: tl.constexpr,
    RB: tl.constexpr,
    FEATURE: tl.constexpr,
    SCOPE: tl.constexpr,
    RELEASED: tl.constexpr,
    OVERFLOW: tl.constexpr,
    GATE: tl.constexpr,
    FACTOR: tl.constexpr,
    RAGGED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Output of one token per row (rows with new_tokens 0 get zeros). Grid (GR * (ND + WP + 1) + NS, HS, B).

    ND = D / DS slices of S, WP = 2C / BL parts of the window, one program for rows on their way into the cache. With overflow
    "error" a promotion is part of this launch; with a folding policy it has happened before (select, features, scan).
    p_present_length, where given, gets the lengths after the step; it must not be past_length, which others still read.
    """
    ND: tl.constexpr = DP // DS
    WP: tl.constexpr = 2 * C // BL
    JOBS: tl.constexpr = ND + WP + 1
    FUSED: tl.constexpr = OVERFLOW == 0
    i_role = tl.program_id(0)
    i_select = tl.program_id(1)
    i_batch = tl.program_id(2)
    HS = tl.num_programs(1)
    GR = H // HS
    G = H // HK
    row, start, length, count = row_of(i_batch, p_new_tokens, p_past_length, p_query_start, p_state_row, 1, RAGGED)
    i_group = i_batch.to(tl.int64) * H + i_select * GR  # first query head of the group in [B, H]
    if p_present_length is not None:
        if (i_role == 0) & (i_select == 0):
            past = tl.load(p_past_length + i_batch)
            tl.store(p_present_length + i_batch, past + count.to(past.dtype))
    if count == 0:
        if not RAGGED:
            if i_role < GR:
                o_dim = tl.arange(0, DP)
                b_zero = tl.zeros([DP], p_output.dtype.element_ty)
                tl.store(p_output + (i_group + i_role) * D + o_dim, b_zero, mask=o_dim < D)
        return
    i_out = start * H + i_select * GR  # the same in the packed activations
    chunk = length // C
    promoting = (length % C == 0) & (chunk >= 2)
    scale2 = scale * LOG2E
    parts = NS + WP + 1
    if i_role < GR * JOBS:
        g = i_role // JOBS
        i_job = i_role % JOBS
        i_head = i_select * GR + g
        i_kv = i_head // G
        p_q = p_query + (i_out + g) * D
        i_part = (i_group + g) * parts + NS + i_job - ND
        if i_job < ND:
            linear_slice(
                i_job, i_head, i_select, row, length, promoting, GR, p_q, p_feature_q_weight, p_feature_k_weight,
                p_window_key, p_window_value, p_window_score, p_kv_state, p_z_state, p_part_lin + (i_group + g) * D,
                p_part_den + i_group + g, i_kv, H, HK, K, W_HEADS, C, D, DP, DK, DS, P, PP, GP, RB, FEATURE, SCOPE, FUSED,
                DOT,
            )  # fmt: skip
        elif i_job < ND + WP:
            window_part(
                i_job - ND, i_head, row, length, p_q, p_key + (start * HK + i_kv) * D, p_value + (start * HK + i_kv) * D,
                p_window_key, p_window_value, p_part_acc + i_part * D, p_part_ml + i_part * 2,
                p_part_window + ((i_group + g) * WP + i_job - ND) * 4, i_kv, G, HK, phantom, scale2,
                (promoting == 0) | (OVERFLOW > 0), C, D, DP, BL, RELEASED,
            )  # fmt: skip
        elif FUSED and promoting:
            fresh_part(
                chunk - 2, i_select, g, row, length, GR, HS, p_q, p_window_key, p_window_value, p_window_score,
                p_salient_key, p_salient_value, p_part_acc + i_part * D, p_part_ml + i_part * 2, i_kv, H, HK, K, N,
                scale2, C, D, DP, KP, GP, SCOPE,
            )  # fmt: skip
        else:
            o_dim = tl.arange(0, DP)
            tl.store(p_part_acc + i_part * D + o_dim, tl.zeros([DP], tl.float32), mask=o_dim < D)
            tl.store(p_part_ml + i_part * 2, FAR)
            tl.store(p_part_ml + i_part * 2 + 1, 0.0)
    else:
        i_split = i_role - GR * JOBS
        seen = tl.maximum(chunk - 1, 0) * K
        if FUSED:
            seen = tl.where(promoting, seen - K, seen)  # the newest rows are on their way
        seen = tl.minimum(seen, N)
        share = (seen + NS * BN - 1) // (NS * BN) * BN
        low = tl.minimum(i_split * share, seen)
        high = tl.minimum(low + share, seen)
        base = (row * HS + i_select) * N * D
        i_part = i_group * parts + i_split
        if SCOPE == 0:
            salient_one(
                p_salient_key + base, p_salient_value + base, p_query + i_out * D, low, high, scale2,
                p_part_acc + i_part * D, p_part_ml + i_part * 2, D, DP, BN,
            )  # fmt: skip
        else:
            salient_group(
                p_salient_key + base, p_salient_value + base, p_query, i_out, GR, low, high, scale2, p_part_acc,
                p_part_ml, i_part, parts, D, DP, BN, GP, DOT,
            )  # fmt: skip

    tl.debug_barrier()
    p_counter = p_counters + i_batch * (2 * H) + i_select
    if tl.atomic_add(p_counter, 1, sem="acq_rel") != GR * JOBS + NS - 1:
        return
    tl.store(p_counter, 0)
    for g in range(GR):
        _merge(
            i_group + g, i_out + g, i_select * GR + g, row * H + i_select * GR + g, length, K, N, parts, epsilon,
            p_part_acc, p_part_ml, p_part_lin, p_part_den, p_part_window, p_gate, p_window_factor, p_window_score,
            p_output, C, D, DP, BS, WP, RELEASED, GATE, FACTOR, OVERFLOW,
        )  # fmt: skip
    if FUSED:
        if promoting:
            tl.debug_barrier()
            p_counter = p_counters + i_batch * (2 * H) + H
            if tl.atomic_add(p_counter, 1, sem="acq_rel") == HS - 1:
                tl.store(p_counter, 0)
                _commit_token(p_key, p_value, p_window_key, p_window_value, row, start, length, HK, C, D)
