"""One token per row in one launch: splits of the salient cache, parts of the window and slices of S, merged by the last program.

Programs of one query head share a counter. Every program writes its partial result, then increments the counter; the last one merges
all partials of the head against the true maximum. The counters are zero between launches, so a CUDA graph can capture the launch.
Besides memory traffic a step costs a chain of dependent loads, so each role issues its loads together and reduces as little as it
can.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import LOG2E, prefetch, rounded, store_rows
from still_kernels.hybrid_attention.decode.triton_decode_linear import linear_slice, linear_whole
from still_kernels.hybrid_attention.decode.triton_decode_roles import (
    FAR,
    fresh_part,
    salient_group,
    salient_one,
    step_of,
    window_group,
    window_part,
)
from still_kernels.hybrid_attention.decode.triton_decode_types import Constants, Heads, Parts, Room, Row, States
from still_kernels.hybrid_attention.triton_pages import cache_of, in_page, scales_of


@triton.jit
def _load_parts(p_acc, p_ml, s, parts, GR, o_dim, D: tl.constexpr, BS: tl.constexpr):
    """Accumulators [BS, DP], maxima and sums [BS] of parts s .. s + BS - 1 of one head."""
    o_part = s + tl.arange(0, BS)
    m_part = o_part < parts
    m_acc = m_part[:, None] & (o_dim < D)[None, :]
    b_acc = tl.load(p_acc + o_part[:, None] * GR * D + o_dim[None, :], mask=m_acc, other=0.0)
    b_most = tl.load(p_ml + o_part * GR * 2, mask=m_part, other=FAR)
    b_sums = tl.load(p_ml + o_part * GR * 2 + 1, mask=m_part, other=0.0)
    return b_acc, b_most, b_sums


@triton.jit
def _merge(
    g, heads, i_group, i_out, i_part, i_score, length, live, promoting, count, room, epsilon, parts, p_window_factor,
    p_window_score, p_output, c: tl.constexpr,
):  # fmt: skip
    """Combine the `count` partials of query head g of a group, from part i_part on, against their maximum; store output and score."""
    # All loads are on their way before anything is reduced: one trip to L2 in place of one per value.
    o_dim = tl.arange(0, c.DP)
    m_dim = o_dim < c.D
    p_acc = parts.acc + (i_part * heads.GR + g) * c.D
    p_ml = parts.ml + (i_part * heads.GR + g) * 2
    b_acc, b_most, b_sums = _load_parts(p_acc, p_ml, 0, count, heads.GR, o_dim, c.D, c.BS)
    o_window = 4 * tl.arange(0, c.WP)
    p_window = parts.window + (i_group + g) * (4 * c.WP)
    b_others = tl.load(p_window + o_window)
    b_rest = tl.load(p_window + o_window + 1)
    own = tl.load(p_window + (3 if c.RELEASED else 2))
    b_linear = tl.load(parts.lin + (i_group + g) * c.D + o_dim, mask=m_dim, other=0.0)
    mass = tl.load(parts.den + i_group + g)

    top = tl.max(b_most, 0)
    b_weight = tl.exp2(b_most - top)
    total = tl.sum(rounded(b_sums, b_weight), 0)
    b_out = tl.sum(b_acc * b_weight[:, None], 0)
    for s in range(c.BS, count, c.BS):
        b_acc, b_most, b_sums = _load_parts(p_acc, p_ml, s, count, heads.GR, o_dim, c.D, c.BS)
        new = tl.maximum(top, tl.max(b_most, 0))
        b_weight = tl.exp2(b_most - new)
        decay = tl.exp2(top - new)
        total = total * decay + tl.sum(rounded(b_sums, b_weight), 0)
        b_out = b_out * decay + tl.sum(b_acc * b_weight[:, None], 0)
        top = new
    if c.FACTOR:
        factor = tl.load(p_window_factor + heads.i_select * heads.GR + g)
        total = total * factor
        b_out = b_out * factor
    b_out = (b_out + b_linear) / (total + mass + epsilon)
    if c.FUSED:  # beyond the capacity: the caller should have refused
        b_out = tl.where(tl.maximum(length // c.C - 1, 0) * room.K > room.N, float("nan"), b_out)
    b_out = tl.where(live, b_out, 0.0)
    tl.store(p_output + (i_out + g) * c.D + o_dim, b_out.to(p_output.dtype.element_ty), mask=m_dim)

    # The score of the token, from the parts of the window.
    score = own
    if not c.RELEASED:
        reach = tl.max(b_others, 0)
        score = (own - reach - tl.log2(tl.sum(rounded(b_rest, tl.exp2(b_others - reach)), 0))) / LOG2E
    score = tl.where(length == 0, float("inf"), score)
    if c.SCOPE:
        if promoting:  # other heads of the group may still select by the score that this one replaces
            tl.store(p_window + 2, score)
            live = length < 0
    tl.store(p_window_score + (i_score + g) * (2 * c.C) + (length & (2 * c.C - 1)), score, mask=live)


@triton.jit
def _commit_token(p_key, p_value, states, p_score, row, start, length, heads, c: tl.constexpr):
    """Write the token's key and value into the ring once the promoted chunk has been read, its scores once they have ranked.

    p_score: Where the heads of the row have left their scores, 4 WP apart.
    """
    BW: tl.constexpr = 1024
    slot = length & (2 * c.C - 1)
    if c.SCOPE:
        for s in range(0, heads.H, BW):
            o_head = s + tl.arange(0, BW)
            b_score = tl.load(p_score + o_head * (4 * c.WP), mask=o_head < heads.H, other=0.0)
            tl.store(states.window_score + (row * heads.H + o_head) * (2 * c.C) + slot, b_score, mask=o_head < heads.H)
    if c.CODES:
        o_dim = tl.arange(0, c.DP)
        o_one = tl.arange(0, 1)
        for i_kv in range(0, heads.HK):
            o_row = (row * heads.HK + i_kv) * (2 * c.C) + slot + o_one
            o_from = (start * heads.HK + i_kv) * c.D + o_dim
            b_key = tl.load(p_key + o_from, mask=o_dim < c.D, other=0.0)[None, :]
            store_rows(states.window_key, states.window_key_scale, o_row, b_key, o_one == 0, o_dim, c.D, c.CODES)
            b_value = tl.load(p_value + o_from, mask=o_dim < c.D, other=0.0)[None, :]
            store_rows(states.window_value, states.window_value_scale, o_row, b_value, o_one == 0, o_dim, c.D, c.CODES)
    for s in range(0, 0 if c.CODES else heads.HK * c.D, BW):
        o_flat = s + tl.arange(0, BW)
        m_flat = o_flat < heads.HK * c.D
        o_to = ((row * heads.HK + o_flat // c.D) * (2 * c.C) + slot) * c.D + o_flat % c.D
        b_key = tl.load(p_key + start * heads.HK * c.D + o_flat, mask=m_flat, other=0.0)
        b_value = tl.load(p_value + start * heads.HK * c.D + o_flat, mask=m_flat, other=0.0)
        tl.store(states.window_key + o_to, b_key, mask=m_flat)
        tl.store(states.window_value + o_to, b_value, mask=m_flat)


@triton.jit
def _bring(
    i_role, i_select, i_batch, heads, states, p_weight, W_HEADS, ND: tl.constexpr, WP: tl.constexpr, c: tl.constexpr
):
    """Have a projection, S and the ring brought to L2 while the kernel ahead still runs; nothing of it is used before that has ended.

    Not the cache, of which only the length says how much is in use: waiting for that took more than it gave.
    """
    JOBS: tl.constexpr = ND + WP + 1
    LINE: tl.constexpr = 128
    SIZE: tl.constexpr = p_weight.dtype.element_ty.primitive_bitwidth // 8
    KEPT: tl.constexpr = 1 if c.CODES else SIZE
    o_line = LINE * tl.arange(0, max(c.DP * SIZE // LINE, 1))
    o_kept = LINE * tl.arange(0, max(c.DP * KEPT // LINE, 1))
    row = i_batch.to(tl.int64)
    if i_role < heads.GR * JOBS:
        i_head = i_select * heads.GR + i_role // JOBS
        i_job = i_role % JOBS
        if i_job < ND:
            F: tl.constexpr = 2 * c.P if c.FEATURE <= 1 else c.P
            o_some = i_job * (c.PP // ND) + tl.arange(0, c.PP // ND)
            w_head = tl.where(W_HEADS > 1, i_head, 0).to(tl.int64) * (c.P * c.D)
            prefetch(p_weight + w_head + tl.minimum(o_some, c.P - 1) * c.D, o_line, c.SETTLE)
            o_feature = tl.minimum(tl.arange(0, c.PP), c.P - 1)
            o_part = LINE * tl.arange(0, max(c.DS * 4 // LINE, 1))
            p_slice = states.kv + (row * heads.H + i_head) * (F * c.D) + i_job * c.DS + o_feature * c.D
            prefetch(p_slice, o_part, c.SETTLE)
            if c.FEATURE <= 1:
                prefetch(p_slice + c.P * c.D, o_part, c.SETTLE)
        elif i_job < ND + WP:
            o_slot = (row * heads.HK + i_head // heads.G) * (2 * c.C) + (i_job - ND) * c.BL + tl.arange(0, c.BL)
            prefetch(states.window_key + o_slot * c.D, o_kept, c.SETTLE)
            prefetch(states.window_value + o_slot * c.D, o_kept, c.SETTLE)


@triton.jit(do_not_specialize=["H", "HK", "G", "K", "N", "W_HEADS", "NS", "phantom"])
def decode_kernel(
    p_query, p_key, p_value, p_gate, p_feature_q_weight, p_feature_k_weight, p_window_factor, p_window_key, p_window_value,
    p_window_score, p_salient_key, p_salient_value, p_kv_state, p_z_state, p_window_key_scale, p_window_value_scale,
    p_salient_key_scale, p_salient_value_scale, p_new_tokens, p_past_length, p_query_start, p_state_row, p_part_acc, p_part_ml,
    p_part_lin, p_part_den, p_part_window, p_counters, p_output, p_present_length,
    H, HK, G, K, N, W_HEADS, NS, phantom, scale, epsilon,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DK: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, KP: tl.constexpr,
    GP: tl.constexpr, DS: tl.constexpr, LF: tl.constexpr, LS: tl.constexpr, WG: tl.constexpr, DW: tl.constexpr,
    BN: tl.constexpr, SN: tl.constexpr, BG: tl.constexpr, SG: tl.constexpr, BL: tl.constexpr, BS: tl.constexpr,
    RB: tl.constexpr, FEATURE: tl.constexpr, SCOPE: tl.constexpr, RELEASED: tl.constexpr, EVICT: tl.constexpr,
    GATE: tl.constexpr, FACTOR: tl.constexpr, RAGGED: tl.constexpr, PAGES: tl.constexpr, CODES: tl.constexpr,
    SETTLE: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Output of one token per row (rows with new_tokens 0 get zeros). Grid (GR * (ND + WP + 1) + NS, HS, B).

    ND = D / DS slices of S, WP = 2C / BL parts of the window, one program for rows on their way into the cache; with LF one program for
    all of S, and the first split sees to these rows. With overflow "error" a promotion is part of this launch; with a folding policy it
    has happened before (select, features, scan).
    p_present_length, where given, gets the lengths after the step; it must not be past_length, which others still read.
    """
    ND: tl.constexpr = 1 if LF else DP // DS
    WP: tl.constexpr = 2 * C // BL
    JOBS: tl.constexpr = ND + WP if LF else ND + WP + 1
    FUSED: tl.constexpr = EVICT == 0
    SHARED: tl.constexpr = (WG != 0) & (SCOPE == 0) & (RELEASED == 0)
    c: tl.constexpr = Constants(
        C, D, DP, DK, P, PP, KP, GP, DS, LF, LS, DW, BN, SN, BG, SG, BL, BS, RB, WP, FEATURE, SCOPE, RELEASED, FUSED, GATE,
        FACTOR, RAGGED, PAGES, CODES, SETTLE, DOT,
    )  # fmt: skip
    i_role = tl.program_id(0)
    i_select = tl.program_id(1)
    i_batch = tl.program_id(2)
    HS = tl.num_programs(1)
    GR = 1 if SCOPE == 0 else G  # query heads that share a selection
    heads = Heads(i_select, GR, HS, H, HK, G)
    room = Room(K, N, NS)
    if AHEAD and PDL and not RAGGED:
        states = States(
            p_window_key, p_window_value, p_window_score, p_salient_key, p_salient_value, p_kv_state, p_z_state,
            p_window_key_scale, p_window_value_scale, p_salient_key_scale, p_salient_value_scale,
        )  # fmt: skip
        _bring(i_role, i_select, i_batch, heads, states, p_feature_q_weight, W_HEADS, ND, WP, c)
    if PDL and SETTLE:  # not in the interpreter
        # The kernel ahead may still run: wait for it before touching memory. The next kernel may be launched meanwhile.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = i_batch.to(tl.int64)
    start = row
    if RAGGED:
        start = tl.load(p_query_start + i_batch).to(tl.int64)
        if PAGES != 0:
            row = start * 0
        else:
            row = tl.load(p_state_row + i_batch).to(tl.int64)
        if tl.load(p_query_start + i_batch + 1).to(tl.int64) == start:  # no token of the call is this row's
            return
    if PAGES != 0:
        p_window_key = in_page(p_window_key, p_state_row, i_batch, 0, PAGES)
        p_window_value = in_page(p_window_value, p_state_row, i_batch, 0, PAGES)
        p_window_score = in_page(p_window_score, p_state_row, i_batch, 0, PAGES)
        p_z_state = in_page(p_z_state, p_state_row, i_batch, 0, PAGES)
        if CODES:
            p_window_key_scale = in_page(p_window_key_scale, p_state_row, i_batch, 0, PAGES)
            p_window_value_scale = in_page(p_window_value_scale, p_state_row, i_batch, 0, PAGES)
        p_past_length += i_batch  # lengths are those of the call's rows
    at = Row(i_batch, row, p_new_tokens, p_past_length, p_state_row)
    states = States(
        p_window_key, p_window_value, p_window_score, p_salient_key, p_salient_value, p_kv_state, p_z_state,
        p_window_key_scale, p_window_value_scale, p_salient_key_scale, p_salient_value_scale,
    )  # fmt: skip
    parts = Parts(p_part_acc, p_part_ml, p_part_lin, p_part_den, p_part_window)
    i_group = i_batch.to(tl.int64) * H + i_select * GR  # first query head of the group in [B, H]
    i_out = start * H + i_select * GR  # the same in the packed activations
    scale2 = scale * LOG2E
    i_first = (i_batch.to(tl.int64) * HS + i_select) * (NS + WP + 1)  # the group's first part, of GR rows
    arrivals = 1  # heads, each with its own selection, that the program computes for
    if i_role < GR * JOBS:
        g = i_role // JOBS
        i_job = i_role % JOBS
        i_head = i_select * GR + g
        p_q = p_query + (i_out + g) * D
        i_part = (i_first + NS + i_job - ND) * GR + g
        if i_job < ND:
            if LF:
                linear_whole(
                    at, states, heads, i_head, p_q, p_gate + (i_out + g) * D if GATE else p_gate, p_feature_q_weight, p_feature_k_weight,
                    W_HEADS, K, parts.lin + (i_group + g) * D, parts.den + i_group + g, c,
                )  # fmt: skip
            else:
                linear_slice(
                    at, states, heads, i_head, i_job, p_q, p_gate + (i_out + g) * D if GATE else p_gate, p_feature_q_weight,
                    p_feature_k_weight, W_HEADS, K, parts.lin + (i_group + g) * D, parts.den + i_group + g, c,
                )  # fmt: skip
        else:
            i_kv = i_head // G if SCOPE == 0 else i_select
            if i_job < ND + WP:
                if SHARED:
                    arrivals = 0  # another program computes for this head
                    if i_head % G == 0:
                        arrivals = G
                        window_group(
                            at, states, heads, i_kv, i_job - ND, p_q, p_key + (start * HK + i_kv) * D, p_value + (start * HK + i_kv) * D,
                            phantom, scale2, parts.acc + i_part * D, parts.ml + i_part * 2, NS + WP + 1,
                            parts.window + (i_group * WP + i_job - ND) * 4, c,
                        )  # fmt: skip
                else:
                    p_k = p_key + (start * HK + i_kv) * D
                    p_v = p_value + (start * HK + i_kv) * D
                    p_acc = parts.acc + i_part * D
                    p_ml = parts.ml + i_part * 2
                    p_window = parts.window + ((i_group + g) * WP + i_job - ND) * 4
                    window_part(
                        at, states, heads, i_head, i_kv, i_job - ND, p_q, p_k, p_v, phantom, scale2, p_acc, p_ml, p_window, c
                    )  # fmt: skip
            else:
                p_acc = parts.acc + i_part * D
                p_ml = parts.ml + i_part * 2
                fresh_part(at, states, heads, i_kv, g, p_q, room, scale2, p_acc, p_ml, c)
    else:
        i_split = i_role - GR * JOBS
        i_part = (i_first + i_split) * GR
        p_k = cache_of(p_salient_key, row, i_select, HS, N, D, PAGES)
        p_v = cache_of(p_salient_value, row, i_select, HS, N, D, PAGES)
        p_ks = scales_of(p_salient_key_scale, row, i_select, HS, N, CODES, PAGES)
        p_vs = scales_of(p_salient_value_scale, row, i_select, HS, N, CODES, PAGES)
        p_q = p_query + i_out * D
        p_acc = parts.acc + i_part * D
        p_ml = parts.ml + i_part * 2
        if SCOPE == 0:
            salient_one(at, p_k, p_v, p_ks, p_vs, p_q, i_split, room, scale2, p_acc, p_ml, c)
        else:
            salient_group(at, p_k, p_v, p_ks, p_vs, p_q, GR, i_split, room, scale2, p_acc, p_ml, c)
        if LF:
            if i_split == 0:
                i_part = (i_first + NS + WP) * GR
                i_kv = i_select // G if SCOPE == 0 else i_select
                for i in range(0, GR):
                    p_acc = parts.acc + (i_part + i) * D
                    fresh_part(
                        at, states, heads, i_kv, i, p_q + i * D, room, scale2, p_acc, parts.ml + (i_part + i) * 2, c
                    )

    tl.debug_barrier()
    # Who is last at a query head merges it: where heads share splits, several programs may merge at the same time.
    p_counter = p_counters + i_batch * (2 * H) + i_select * GR
    if SCOPE == 0 and not SHARED:
        m_last = tl.atomic_add(p_counter, 1, sem="acq_rel") == JOBS + NS - 1
        merged = m_last.to(tl.int32)
    else:
        o_head = tl.arange(0, GP)
        g = i_role // JOBS
        if SHARED:
            m_head = o_head < arrivals
        else:
            m_head = (o_head < GR) & ((o_head == g) | (g >= GR))
        b_arrived = tl.atomic_add(p_counter + o_head, tl.full([GP], 1, tl.int32), mask=m_head, sem="acq_rel")
        m_last = m_head & (b_arrived == JOBS + NS - 1)
        merged = tl.sum(m_last.to(tl.int32), 0)
    if merged == 0:
        return
    length, live, promoting = step_of(at, c)
    for g in range(0, G if SHARED else GR):
        mine = merged
        if SCOPE or SHARED:
            mine = tl.sum((m_last & (o_head == g)).to(tl.int32), 0)
        if mine > 0:
            tl.store(p_counter + g, 0)
            if p_present_length is not None:
                if i_select + g == 0:
                    past = tl.load(p_past_length + i_batch)
                    tl.store(p_present_length + i_batch, past + live.to(past.dtype))
            if SHARED:
                _merge(
                    0, Heads(i_select + g, GR, HS, H, HK, G), i_group + g, i_out + g, i_first + g * (NS + WP + 1), row * H + i_select + g,
                    length, live, promoting, NS + WP + 1, room, epsilon, parts, p_window_factor, p_window_score, p_output, c,
                )  # fmt: skip
            else:
                _merge(
                    g, heads, i_group, i_out, i_first, row * H + i_select * GR, length, live, promoting, NS + WP + 1, room, epsilon,
                    parts, p_window_factor, p_window_score, p_output, c,
                )  # fmt: skip
    if FUSED:
        if promoting:
            tl.debug_barrier()
            p_counter = p_counters + i_batch * (2 * H) + H
            if tl.atomic_add(p_counter, merged, sem="acq_rel") == H - merged:
                tl.store(p_counter, 0)
                p_score = parts.window + i_batch.to(tl.int64) * H * (4 * WP) + 2
                _commit_token(p_key, p_value, states, p_score, row, start, length, heads, c)
