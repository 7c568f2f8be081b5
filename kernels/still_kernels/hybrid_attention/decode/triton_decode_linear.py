"""Slices of S in the decode kernel: phi(q)^T S, and the fold of a promoted chunk into S."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import LOG2E, as_numbers, prefetch, rounded
from still_kernels.hybrid_attention.decode.triton_decode_roles import pair_sum, step_of
from still_kernels.hybrid_attention.triton_common import (
    FEATURE_FLOOR,
    direction_scale,
    kept_features,
    load_weight,
    plain_features,
    scaled_softmax,
    select_chunk,
)
from still_kernels.hybrid_attention.triton_narrow import load_sums, rest_of, store_sums
from still_kernels.hybrid_attention.triton_pages import head_in_page


@triton.jit
def _selected_of(at, states, heads, i_kv, old, length, o_feature, p_weight, K, c: tl.constexpr):
    """Which tokens of chunk `old`, which lies in the ring, are selected, [C]."""
    # All lines that a round needs are on their way while the selection is made.
    BYTES: tl.constexpr = p_weight.dtype.element_ty.primitive_bitwidth // 8
    KEPT: tl.constexpr = states.window_key.dtype.element_ty.primitive_bitwidth // 8
    o_token = ((at.row * heads.HK + i_kv) * (2 * c.C) + ((old & 1) * c.C + tl.arange(0, c.C))).to(tl.int64) * c.D
    o_kept = tl.arange(0, 4) * (c.D * KEPT // 4)
    o_line = tl.arange(0, 4) * (c.D * BYTES // 4)
    prefetch(states.window_key + o_token, o_kept, c.SETTLE)
    prefetch(states.window_value + o_token, o_kept, c.SETTLE)
    prefetch(p_weight + tl.minimum(o_feature, c.P - 1) * c.D, o_line, c.SETTLE)
    b_selected = select_chunk(
        states.window_score, states.window_score, old, length, length, 0, at.row, heads.i_select, heads.H, heads.GR, K, c.SCOPE, c.GP, c.C
    )  # fmt: skip
    return b_selected


@triton.jit
def _old_rows(states, b_selected, o_row, o_slot, o_ring, o_feature, o_dim, p_weight, c: tl.constexpr):
    """Of RB rows of a promoted chunk: projections [RB, PP], squared norms, 1 or 0 where selected, what multiplies the projection."""
    if c.RB == c.C:
        m_row = b_selected == 0
    else:
        m_here = o_row[:, None] == tl.arange(0, c.C)[None, :]
        m_row = tl.sum((m_here & (b_selected == 0)[None, :]).to(tl.int32), 1) > 0
    b_direction = tl.zeros([c.RB, c.PP], tl.float32)
    b_square = tl.zeros([c.RB], tl.float32)
    for d in range(0, c.DP, c.DK):
        o_part = d + o_dim
        b_k = tl.load(states.window_key + o_ring[:, None] + o_part[None, :], mask=(o_part < c.D)[None, :], other=0.0)
        b_k = as_numbers(b_k, states.window_key_scale, o_slot, o_row >= 0, p_weight.dtype.element_ty, c.CODES)
        b_weight = load_weight(p_weight, o_feature, o_part, c.P, c.D)
        b_direction = tl.dot(b_k, tl.trans(b_weight), b_direction, input_precision=c.DOT)
        b_square += tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), 1)
    b_keep = tl.where(m_row, 1.0, 0.0)
    b_scale = direction_scale(tl.sum(b_direction * b_direction, 1), b_square, c.FEATURE)
    return b_direction, b_square, b_keep, b_scale


@triton.jit
def _half_of(b_direction, b_square, b_keep, b_scale, o_feature, half: tl.constexpr, c: tl.constexpr):
    """One half of the features of rows, [RB, PP]."""
    if c.FEATURE <= 1:
        b_signed = b_direction if half == 0 else -b_direction
        b_rows = scaled_softmax(b_signed, b_scale, b_keep, o_feature < c.P, c.P, c.PP)
    else:
        b_rows, _zeros = kept_features(b_direction, b_square, b_keep, c.P, c.PP, c.FEATURE)
    return b_rows


@triton.jit
def _fold_chunk(
    at, states, heads, i_kv, b_phi, b_psi, old, length, p_weight, p_state, p_rest, p_mass, m_mass, o_column, K, c: tl.constexpr
):  # fmt: skip
    """Unselected tokens of chunk `old` into a slice of S and z; gives what they add to phi(q)^T S [DS] and, unsummed, phi(q)^T z [PP]."""
    o_feature = tl.arange(0, c.PP)
    o_dim = tl.arange(0, c.DK)
    b_selected = _selected_of(at, states, heads, i_kv, old, length, o_feature, p_weight, K, c)
    b_more = tl.zeros([c.DS], tl.float32)
    b_more_mass = tl.zeros([c.PP], tl.float32)
    for r in range(0, c.C, c.RB):
        o_row = r + tl.arange(0, c.RB)
        o_slot = ((at.row * heads.HK + i_kv) * (2 * c.C) + ((old & 1) * c.C + o_row)).to(tl.int64)
        o_ring = o_slot * c.D
        b_v = tl.load(
            states.window_value + o_ring[:, None] + o_column[None, :], mask=(o_column < c.D)[None, :], other=0.0
        )
        b_v = as_numbers(b_v, states.window_value_scale, o_slot, o_row >= 0, p_weight.dtype.element_ty, c.CODES)
        b_direction, b_square, b_keep, b_scale = _old_rows(
            states, b_selected, o_row, o_slot, o_ring, o_feature, o_dim, p_weight, c
        )
        for half in tl.static_range(0, 2 if c.FEATURE <= 1 else 1):
            b_rows = _half_of(b_direction, b_square, b_keep, b_scale, o_feature, half, c)
            b_query = b_phi if half == 0 else b_psi
            b_out, b_mass = _add_rows(
                b_rows, b_query, b_v, old + r > 0, p_state + half * (c.P * c.D), p_rest + half * (c.P * c.D), p_mass + half * c.P,
                o_feature, o_column, m_mass, c,
            )  # fmt: skip
            b_more += b_out
            b_more_mass += b_mass
        if c.RB < c.C:
            tl.debug_barrier()  # the next round adds to what this one stored
    return b_more, b_more_mass


@triton.jit
def _add_rows(b_rows, b_query, b_v, held, p_state, p_rest, p_mass, o_feature, o_column, m_mass, c: tl.constexpr):
    """Add phi^T v and rounded phi of rows to half of a slice of S and z, 0 where not `held`; gives what `_fold_chunk` does."""
    b_rows = b_rows.to(b_v.dtype)
    m_slice = (o_feature < c.P)[:, None] & (o_column < c.D)[None, :]
    p_slice = p_state + o_feature[:, None] * c.D + o_column[None, :]
    p_taken = p_rest + o_feature[:, None] * c.D + o_column[None, :]
    b_more = tl.dot(tl.trans(b_rows), b_v, input_precision=c.DOT)
    # Without matrix instructions the sums of columns are most of a promotion's.
    b_ones = tl.full([b_rows.shape[0], 16], 1.0, b_rows.dtype)
    b_mass = tl.max(tl.dot(tl.trans(b_rows), b_ones, input_precision=c.DOT), 1)
    m_z = m_mass
    m_s = m_slice
    if c.PAGES != 0:
        m_z = m_z & held
        m_s = m_s & held
    b_z = tl.load(p_mass + o_feature, mask=m_z, other=0.0)
    b_s = load_sums(p_slice, p_taken, m_s)
    store_sums(p_slice, p_taken, b_s + b_more, m_slice)
    tl.store(p_mass + o_feature, b_z + b_mass, mask=m_mass)
    return tl.sum(b_query[:, None] * b_more, 0), b_query * b_mass


@triton.jit
def _square_and_reach(a_square, a_high, a_low, b_square, b_high, b_low):
    return a_square + b_square, tl.maximum(a_high, b_high), tl.minimum(a_low, b_low)


@triton.jit
def _query_features(b_direction, square, P: tl.constexpr, PP: tl.constexpr, FEATURE: tl.constexpr):
    """Both halves of phi(q), 0 beyond P, from the projection [PP] (0 beyond P) and |q|^2. Two rounds of reductions."""
    m_feature = tl.arange(0, PP) < P
    if FEATURE > 2:
        b_phi = tl.where(m_feature, plain_features(b_direction, FEATURE), 0.0)
        return b_phi, b_phi
    b_high = tl.where(m_feature, b_direction, float("-inf"))
    b_low = tl.where(m_feature, b_direction, float("inf"))
    norm_square, high, low = tl.reduce((rounded(b_direction, b_direction), b_high, b_low), 0, _square_and_reach)
    scale = LOG2E
    if FEATURE == 0:
        scale = LOG2E * tl.sqrt(square) / tl.maximum(tl.sqrt(norm_square), FEATURE_FLOOR)
    b_phi = tl.where(m_feature, tl.exp2((b_direction - high) * scale), 0.0)
    b_psi = tl.where(m_feature, tl.exp2((low - b_direction) * scale), 0.0)
    plus, minus = tl.reduce((b_phi, b_psi), 0, pair_sum)
    b_phi = tl.where(m_feature, tl.maximum(b_phi * (1.0 / plus), FEATURE_FLOOR), 0.0)
    b_psi = tl.where(m_feature, tl.maximum(b_psi * (1.0 / minus), FEATURE_FLOOR), 0.0)
    return b_phi, b_psi


@triton.jit
def _slice_loads(p_q, p_weight, p_slice, m_slice, c: tl.constexpr):
    """First loads of a slice: two blocks of columns of q and of its projection, the first half of S."""
    o_feature = tl.arange(0, c.PP)
    o_dim = tl.arange(0, c.DW)
    SECOND: tl.constexpr = c.DW if c.DP > c.DW else 0
    b_q = tl.load(p_q + o_dim, mask=o_dim < c.D, other=0.0)
    b_weight = load_weight(p_weight, o_feature, o_dim, c.P, c.D)
    b_q2 = b_q
    b_weight2 = b_weight
    if c.DP > c.DW:
        b_q2 = tl.load(p_q + SECOND + o_dim, mask=SECOND + o_dim < c.D, other=0.0)
        b_weight2 = load_weight(p_weight, o_feature, SECOND + o_dim, c.P, c.D)
    return b_q, b_q2, b_weight, b_weight2, tl.load(p_slice, mask=m_slice, other=0.0)


@triton.jit
def _slice_output(loads, p_q, p_gate, p_weight, p_slice, p_mass, o_column, m_slice, m_mass, c: tl.constexpr):
    """phi(q)^T S for the columns of a slice, phi(q) z before it is summed, the gate, both halves of phi(q); from _slice_loads."""
    b_q, b_q2, b_weight, b_weight2, b_plus_s = loads
    o_feature = tl.arange(0, c.PP)
    b_direction = tl.sum(b_weight.to(tl.float32) * b_q.to(tl.float32)[None, :], 1)
    if c.DP > c.DW:
        b_direction += tl.sum(b_weight2.to(tl.float32) * b_q2.to(tl.float32)[None, :], 1)
    for d in tl.static_range(2 * c.DW, c.DP, c.DW):
        o_part = d + tl.arange(0, c.DW)
        b_more = load_weight(p_weight, o_feature, o_part, c.P, c.D)
        b_part = tl.load(p_q + o_part, mask=o_part < c.D, other=0.0)
        b_direction += tl.sum(b_more.to(tl.float32) * b_part.to(tl.float32)[None, :], 1)
    if c.FEATURE <= 1:
        b_minus_s = tl.load(p_slice + c.P * c.D, mask=m_slice, other=0.0)
    b_plus_z = tl.load(p_mass + o_feature, mask=m_mass, other=0.0)
    if c.FEATURE <= 1:
        b_minus_z = tl.load(p_mass + c.P + o_feature, mask=m_mass, other=0.0)
    b_gate = b_q
    if c.GATE:
        b_gate = tl.load(p_gate + o_column, mask=o_column < c.D, other=0.0)
    o_dim = tl.arange(0, c.DP)
    b_whole = tl.load(p_q + o_dim, mask=o_dim < c.D, other=0.0).to(tl.float32)
    b_phi, b_psi = _query_features(b_direction, tl.sum(rounded(b_whole, b_whole), 0), c.P, c.PP, c.FEATURE)
    b_terms = b_phi[:, None] * b_plus_s.to(tl.float32)
    b_mass = b_phi * b_plus_z
    if c.FEATURE <= 1:
        b_terms += b_psi[:, None] * b_minus_s.to(tl.float32)
        b_mass += b_psi * b_minus_z
    return tl.sum(b_terms, 0), b_mass, b_gate, b_phi, b_psi


@triton.jit
def _if_held(b_out, b_mass, held, c: tl.constexpr):
    """What S and z add, or 0 where they hold nothing."""
    if c.PAGES != 0:
        return tl.where(held, b_out, 0.0), tl.where(held, b_mass, 0.0)
    return b_out, b_mass


@triton.jit
def _store_slice(b_out, b_mass, b_gate, p_lin, p_den, i_slice, o_column, c: tl.constexpr):
    """gate * phi(q)^T S, and phi(q)^T z where the slice is the first."""
    if c.GATE:
        b_out = b_out * b_gate.to(tl.float32)
    tl.store(p_lin + o_column, b_out, mask=o_column < c.D)
    if i_slice == 0:
        # Summed as a matrix: Triton 3.7 fails on sm_100 where a vector that comes from tensor memory is.
        tl.store(p_den + tl.arange(0, 1), tl.sum(b_mass[:, None], 0))


@triton.jit
def linear_slice(
    at, states, heads, i_head, i_slice, p_q, p_gate, p_q_weight, p_k_weight, W_HEADS, K, p_lin, p_den, c: tl.constexpr
):
    """gate * phi(q)^T S for DS value columns (and phi(q)^T z in slice 0); a promoted chunk is folded into S on the way.

    Nothing that a plain step loads depends on the length. A promotion loads everything again: held across the branch the values
    would cost the plain step its registers. It adds what the chunk means to the result, in place of reading S after the fold.
    DW columns of the projection take the bytes of DS columns of S, so that phi is born in the layout in which S multiplies it.
    """
    F: tl.constexpr = 2 * c.P if c.FEATURE <= 1 else c.P
    o_feature = tl.arange(0, c.PP)
    o_column = i_slice * c.DS + tl.arange(0, c.DS)
    m_slice = (o_feature < c.P)[:, None] & (o_column < c.D)[None, :]
    m_mass = (o_feature < c.P) & (i_slice == 0)  # z belongs to slice 0
    w_head = tl.where(W_HEADS > 1, i_head, 0).to(tl.int64) * (c.P * c.D)
    p_weight = p_q_weight + w_head
    p_kv, i_own = head_in_page(states.kv, at.p_state_row, at.i_batch, i_head, c.PAGES)
    p_state = p_kv + (at.row * heads.H + i_own) * (F * c.D)
    p_rest = rest_of(p_kv, c.PAGES) + (at.row * heads.H + i_own) * (F * c.D)
    p_mass = states.z + (at.row * heads.H + i_head) * F
    p_slice = p_state + o_feature[:, None] * c.D + o_column[None, :]
    loads = _slice_loads(p_q, p_weight, p_slice, m_slice, c)
    tl.debug_barrier()  # the compiler would move the loads into the branches, behind the trip for the length
    length, _live, promoting = step_of(at, c)
    # A page that is new holds an old row's S and z. Nothing is promoted before position 2C; with a folding policy that has happened.
    held = length >= (2 * c.C + 1 if c.FUSED else 2 * c.C)
    if c.FUSED and promoting:
        loads = _slice_loads(p_q, p_weight, p_slice, m_slice, c)
        b_out, b_mass, b_gate, b_phi, b_psi = _slice_output(
            loads, p_q, p_gate, p_weight, p_slice, p_mass, o_column, m_slice, m_mass, c
        )
        b_out, b_mass = _if_held(b_out, b_mass, held, c)
        tl.debug_barrier()  # all threads have read the slice
        b_more, b_more_mass = _fold_chunk(
            at, states, heads, i_head // heads.G, b_phi, b_psi, length // c.C - 2, length, p_k_weight + w_head, p_state, p_rest, p_mass,
            m_mass, o_column, K, c,
        )  # fmt: skip
        _store_slice(b_out + b_more, b_mass + b_more_mass, b_gate, p_lin, p_den, i_slice, o_column, c)
    else:
        b_out, b_mass, b_gate, _phi, _psi = _slice_output(
            loads, p_q, p_gate, p_weight, p_slice, p_mass, o_column, m_slice, m_mass, c
        )
        b_out, b_mass = _if_held(b_out, b_mass, held, c)
        _store_slice(b_out, b_mass, b_gate, p_lin, p_den, i_slice, o_column, c)


@triton.jit
def _fold_whole(
    at, states, heads, i_kv, b_phi, b_psi, old, length, p_weight, p_state, p_rest, p_mass, p_gate, p_lin, p_den, K, c: tl.constexpr,
):  # fmt: skip
    """`_fold_chunk` for all slices of S, whose features are made once; what they add to the output goes to where that has been stored."""
    o_feature = tl.arange(0, c.PP)
    o_dim = tl.arange(0, c.DK)
    b_selected = _selected_of(at, states, heads, i_kv, old, length, o_feature, p_weight, K, c)
    b_more_mass = tl.zeros([c.PP], tl.float32)
    for r in range(0, c.C, c.RB):
        o_row = r + tl.arange(0, c.RB)
        o_slot = ((at.row * heads.HK + i_kv) * (2 * c.C) + ((old & 1) * c.C + o_row)).to(tl.int64)
        o_ring = o_slot * c.D
        b_direction, b_square, b_keep, b_scale = _old_rows(
            states, b_selected, o_row, o_slot, o_ring, o_feature, o_dim, p_weight, c
        )
        for half in tl.static_range(0, 2 if c.FEATURE <= 1 else 1):
            b_rows = _half_of(b_direction, b_square, b_keep, b_scale, o_feature, half, c)
            b_query = b_phi if half == 0 else b_psi
            for i in range(0, c.DP // c.DS):
                o_column = i * c.DS + tl.arange(0, c.DS)
                m_column = o_column < c.D
                b_v = tl.load(
                    states.window_value + o_ring[:, None] + o_column[None, :], mask=m_column[None, :], other=0.0
                )
                b_v = as_numbers(b_v, states.window_value_scale, o_slot, o_row >= 0, p_weight.dtype.element_ty, c.CODES)
                b_more, b_mass = _add_rows(
                    b_rows, b_query, b_v, old + r > 0, p_state + half * (c.P * c.D), p_rest + half * (c.P * c.D), p_mass + half * c.P,
                    o_feature, o_column, (o_feature < c.P) & (i == 0), c,
                )  # fmt: skip
                b_more_mass += tl.where(i == 0, b_mass, 0.0)
                if c.GATE:
                    b_more *= tl.load(p_gate + o_column, mask=m_column, other=0.0).to(tl.float32)
                b_out = tl.load(p_lin + o_column, mask=m_column, other=0.0)
                tl.debug_barrier()  # copies of a value that threads hold are read before one of them is stored
                tl.store(p_lin + o_column, b_out + b_more, mask=m_column)
                tl.debug_barrier()
    o_one = tl.arange(0, 1)
    b_mass = tl.load(p_den + o_one) + tl.sum(b_more_mass[:, None], 0)
    tl.debug_barrier()
    tl.store(p_den + o_one, b_mass)


@triton.jit
def linear_whole(
    at, states, heads, i_head, p_q, p_gate, p_q_weight, p_k_weight, W_HEADS, K, p_lin, p_den, c: tl.constexpr
):
    """The same for all value columns, LF rows of S after the other: where rows fill the chip, phi(q) is made once for a head, and LS - 1
    blocks are on their way through shared memory.
    """
    F: tl.constexpr = 2 * c.P if c.FEATURE <= 1 else c.P
    BLOCKS: tl.constexpr = c.PP // c.LF
    LINE: tl.constexpr = 128
    o_feature = tl.arange(0, c.PP)
    o_dim = tl.arange(0, c.DP)
    m_mass = o_feature < c.P
    w_head = tl.where(W_HEADS > 1, i_head, 0).to(tl.int64) * (c.P * c.D)
    p_weight = p_q_weight + w_head
    p_kv, i_own = head_in_page(states.kv, at.p_state_row, at.i_batch, i_head, c.PAGES)
    p_state = p_kv + (at.row * heads.H + i_own) * (F * c.D)
    p_rest = rest_of(p_kv, c.PAGES) + (at.row * heads.H + i_own) * (F * c.D)
    p_mass = states.z + (at.row * heads.H + i_head) * F
    # S is asked for while phi(q) is made: its first half, of which each row is a few lines.
    SIZE: tl.constexpr = states.kv.dtype.element_ty.primitive_bitwidth // 8
    o_line = tl.minimum(LINE * tl.arange(0, max(c.DP * SIZE // LINE, 1)), (c.D - 1) * SIZE)
    prefetch(p_state + tl.minimum(o_feature, c.P - 1) * c.D, o_line, c.SETTLE)
    length, _live, promoting = step_of(at, c)
    held = length >= (2 * c.C + 1 if c.FUSED else 2 * c.C)
    b_direction = tl.zeros([c.PP], tl.float32)
    for d in tl.static_range(0, c.DP, c.DW):
        o_part = d + tl.arange(0, c.DW)
        b_weight = load_weight(p_weight, o_feature, o_part, c.P, c.D)
        b_part = tl.load(p_q + o_part, mask=o_part < c.D, other=0.0)
        b_direction += tl.sum(b_weight.to(tl.float32) * b_part.to(tl.float32)[None, :], 1)
    b_q = tl.load(p_q + o_dim, mask=o_dim < c.D, other=0.0)
    b_gate = b_q
    if c.GATE:
        b_gate = tl.load(p_gate + o_dim, mask=o_dim < c.D, other=0.0)
    b_mass = tl.load(p_mass + o_feature, mask=m_mass, other=0.0)
    if c.FEATURE <= 1:
        b_minus_z = tl.load(p_mass + c.P + o_feature, mask=m_mass, other=0.0)
    b_whole = b_q.to(tl.float32)
    b_phi, b_psi = _query_features(b_direction, tl.sum(rounded(b_whole, b_whole), 0), c.P, c.PP, c.FEATURE)
    b_mass = b_phi * b_mass
    if c.FEATURE <= 1:
        b_mass += b_psi * b_minus_z
    b_plus = tl.reshape(b_phi, [BLOCKS, c.LF])
    b_minus = tl.reshape(b_psi, [BLOCKS, c.LF])
    o_block = tl.arange(0, BLOCKS)
    o_row = tl.arange(0, c.LF)
    b_sum = tl.zeros([c.LF, c.DP], tl.float32)
    for i in tl.range(0, 2 * BLOCKS if c.FEATURE <= 1 else BLOCKS, num_stages=c.LS):
        j = i % BLOCKS
        o_this = j * c.LF + o_row
        o_from = o_this + (i // BLOCKS) * c.P
        m_this = (o_this < c.P)[:, None] & (o_dim < c.D)[None, :]
        b_s = tl.load(p_state + o_from[:, None] * c.D + o_dim[None, :], mask=m_this, other=0.0)
        b_these = tl.where(i < BLOCKS, b_plus, b_minus)
        b_these = tl.sum(tl.where((o_block == j)[:, None], b_these, 0.0), 0)
        b_sum += b_these[:, None] * b_s.to(tl.float32)
    b_out, b_mass = _if_held(tl.sum(b_sum, 0), b_mass, held, c)
    _store_slice(b_out, b_mass, b_gate, p_lin, p_den, 0, o_dim, c)
    if c.FUSED and promoting:
        tl.debug_barrier()  # all threads have read S and stored the output
        _fold_whole(
            at, states, heads, i_head // heads.G, b_phi, b_psi, length // c.C - 2, length, p_k_weight + w_head, p_state, p_rest, p_mass,
            p_gate, p_lin, p_den, K, c,
        )  # fmt: skip
