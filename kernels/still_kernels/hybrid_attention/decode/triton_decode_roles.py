"""Roles of the decode kernel's programs before the merge: cache splits, parts of the window, promoted rows."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import as_numbers, prefetch, rounded, store_rows, wide
from still_kernels.hybrid_attention.triton_common import RELEASED_EPSILON, select_chunk, selected_offsets
from still_kernels.hybrid_attention.triton_pages import rows_of, scale_slots_of, slots_of

FAR = tl.constexpr(-1.0e30)  # below every logit, and finite: differences stay numbers


@triton.jit
def step_of(at, c: tl.constexpr):
    """(length before the step, whether the row brings a token, whether this launch promotes a chunk); clamped as row_of does.

    Every role asks for itself, after its first loads: what is asked at the start, all wait for.
    """
    past = tl.load(at.p_past_length + at.row).to(tl.int64)
    length = tl.minimum(tl.maximum(past, 0), 1 << 30).to(tl.int32)
    live = length >= 0
    if not c.RAGGED:  # packed rows without a token have left
        live = tl.load(at.p_new_tokens + at.i_batch) > 0
    promoting = live & (length % c.C == 0) & (length >= 2 * c.C)
    if not c.FUSED:
        promoting = length < 0
    return length, live, promoting


@triton.jit
def _load_rows(at, p_key, p_value, low, high, o_row, o_dim, c: tl.constexpr):
    """Keys and values of slots low + o_row below `high`, as they are kept; zeros elsewhere."""
    mask = (low + o_row < high)[:, None] & (o_dim < c.D)[None, :]
    o_tile = o_row[:, None] * c.D + o_dim[None, :]
    o_key = slots_of(p_key, at.p_state_row, at.i_batch, low, 0, c.D, c.PAGES) + o_tile
    o_value = slots_of(p_value, at.p_state_row, at.i_batch, low, 1, c.D, c.PAGES) + o_tile
    return tl.load(p_key + o_key, mask=mask, other=0.0), tl.load(p_value + o_value, mask=mask, other=0.0)


@triton.jit
def _load_scales(at, p_key_scale, p_value_scale, low, high, o_row, c: tl.constexpr):
    """Those of such rows; zeros where rows are numbers, which nothing reads."""
    b_key = tl.zeros([o_row.shape[0]], tl.float32)
    b_value = b_key
    if c.CODES:
        o_key = scale_slots_of(p_key_scale, at.p_state_row, at.i_batch, low, 0, c.CODES, c.PAGES)
        o_value = scale_slots_of(p_value_scale, at.p_state_row, at.i_batch, low, 1, c.CODES, c.PAGES)
        b_key = tl.load(p_key_scale + o_key + o_row, mask=low + o_row < high, other=0.0)
        b_value = tl.load(p_value_scale + o_value + o_row, mask=low + o_row < high, other=0.0)
    return b_key, b_value


@triton.jit
def _absorb(b_k, b_v, b_ks, b_vs, low, seen, o_row, b_q, b_max, b_sum, b_acc, c: tl.constexpr):
    """Add a block of rows to a running softmax that every row keeps for itself; sums of codes take half the instructions."""
    m_row = low + o_row < seen
    b_logit = tl.sum(wide(b_k, c.CODES, c.SETTLE) * b_q[None, :], 1)
    if c.CODES:
        b_logit *= b_ks
    b_logit = tl.where(m_row, b_logit, FAR)
    b_new = tl.maximum(b_max, b_logit)
    b_p = tl.where(m_row, tl.exp2(b_logit - b_new), 0.0)
    b_decay = tl.exp2(b_max - b_new)
    b_share = b_p
    if c.CODES:
        b_share = b_p * b_vs
    b_acc = b_acc * b_decay[:, None] + b_share[:, None] * wide(b_v, c.CODES, c.SETTLE)
    return b_new, b_sum * b_decay + b_p, b_acc


@triton.jit
def slots_in_use(at, room, c: tl.constexpr):
    """Slots of the cache that a step reads: none without a token; the rows that are being promoted are on their way."""
    length, live, promoting = step_of(at, c)
    seen = tl.maximum(length // c.C - 1 - promoting.to(tl.int32), 0) * room.K
    return tl.where(live, tl.minimum(seen, room.N), 0)


@triton.jit
def salient_one(at, p_key, p_value, p_ks, p_vs, p_q, i_split, room, scale2, p_acc, p_ml, c: tl.constexpr):
    """Partial softmax of one query head over blocks i_split, i_split + NS, ... of BN slots in use.

    SN - 1 blocks are on their way through shared memory: with one, the latency of the memory bounds the speed, and blocks that
    wait in registers are waited for at the end of each round, where they are unpacked. The first block is fetched before the
    number of slots in use is known, so it may hold anything beyond; it comes last.
    """
    o_dim = tl.arange(0, c.DP)
    o_row = tl.arange(0, c.BN)
    step = room.NS * c.BN
    first = i_split * c.BN
    b_first_k, b_first_v = _load_rows(at, p_key, p_value, first, room.N, o_row, o_dim, c)
    b_first_ks, b_first_vs = _load_scales(at, p_ks, p_vs, first, room.N, o_row, c)
    seen = slots_in_use(at, room, c)
    b_q = tl.load(p_q + o_dim, mask=o_dim < c.D, other=0.0).to(tl.float32) * scale2
    b_max = tl.full([c.BN], FAR, tl.float32)
    b_sum = tl.zeros([c.BN], tl.float32)
    b_acc = tl.zeros([c.BN, c.DP], tl.float32)
    for s in tl.range(first + step, seen, step, num_stages=c.SN):
        b_k, b_v = _load_rows(at, p_key, p_value, s, seen, o_row, o_dim, c)
        b_ks, b_vs = _load_scales(at, p_ks, p_vs, s, seen, o_row, c)
        b_max, b_sum, b_acc = _absorb(b_k, b_v, b_ks, b_vs, s, seen, o_row, b_q, b_max, b_sum, b_acc, c)
    m_first = first + o_row < seen
    b_first_v = tl.where(m_first[:, None], b_first_v, tl.zeros_like(b_first_v))
    b_first_vs = tl.where(m_first, b_first_vs, 0.0)
    b_max, b_sum, b_acc = _absorb(
        b_first_k, b_first_v, b_first_ks, b_first_vs, first, seen, o_row, b_q, b_max, b_sum, b_acc, c
    )
    top = tl.max(b_max, 0)
    b_weight = tl.exp2(b_max - top)
    tl.store(p_acc + o_dim, tl.sum(rounded(b_acc, b_weight[:, None]), 0), mask=o_dim < c.D)
    tl.store(p_ml, top)
    tl.store(p_ml + 1, tl.sum(rounded(b_sum, b_weight), 0))


@triton.jit
def salient_group(at, p_key, p_value, p_ks, p_vs, p_q, GR, i_split, room, scale2, p_acc, p_ml, c: tl.constexpr):
    """The same for the GR query heads of a key/value head, which read blocks of BG rows once; p_acc, p_ml: GR rows."""
    o_dim = tl.arange(0, c.DP)
    o_head = tl.arange(0, c.GP)
    m_head = o_head < GR
    o_row = tl.arange(0, c.BG)
    o_tile = o_head[:, None] * c.D + o_dim[None, :]
    m_tile = m_head[:, None] & (o_dim < c.D)[None, :]
    o_slot = tl.minimum(i_split * c.BG + o_row, room.N - 1)  # a row that is there, in use or not
    o_key = rows_of(p_key, at.p_state_row, at.i_batch, 0, 0, 0, o_slot, o_slot >= 0, 0, c.D, c.PAGES) * c.D
    o_value = rows_of(p_value, at.p_state_row, at.i_batch, 0, 0, 0, o_slot, o_slot >= 0, 1, c.D, c.PAGES) * c.D
    o_line = tl.arange(0, 4) * (c.D * (p_key.dtype.element_ty.primitive_bitwidth // 8) // 4)
    if room.N > 0:
        prefetch(p_key + o_key, o_line, c.SETTLE)
        prefetch(p_value + o_value, o_line, c.SETTLE)
    seen = slots_in_use(at, room, c)
    b_q = tl.load(p_q + o_tile, mask=m_tile, other=0.0)
    b_max = tl.full([c.GP], FAR, tl.float32)
    b_sum = tl.zeros([c.GP], tl.float32)
    b_acc = tl.zeros([c.GP, c.DP], tl.float32)
    for s in tl.range(i_split * c.BG, seen, room.NS * c.BG, num_stages=c.SG):
        b_k, b_v = _load_rows(at, p_key, p_value, s, seen, o_row, o_dim, c)
        o_scale = scale_slots_of(p_ks, at.p_state_row, at.i_batch, s, 0, c.CODES, c.PAGES) + o_row
        b_k = as_numbers(b_k, p_ks, o_scale, s + o_row < seen, p_q.dtype.element_ty, c.CODES)
        o_scale = scale_slots_of(p_vs, at.p_state_row, at.i_batch, s, 1, c.CODES, c.PAGES) + o_row
        b_v = as_numbers(b_v, p_vs, o_scale, s + o_row < seen, p_q.dtype.element_ty, c.CODES)
        m_row = s + o_row < seen
        b_logit = tl.dot(b_q, tl.trans(b_k), input_precision=c.DOT) * scale2
        b_logit = tl.where(m_row[None, :], b_logit, FAR)
        b_new = tl.maximum(b_max, tl.max(b_logit, 1))
        b_p = tl.where(m_row[None, :], tl.exp2(b_logit - b_new[:, None]), 0.0)
        b_decay = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision=c.DOT)
        b_max = b_new
    tl.store(p_acc + o_tile, b_acc, mask=m_tile)
    tl.store(p_ml + o_head * 2, b_max, mask=m_head)
    tl.store(p_ml + o_head * 2 + 1, b_sum, mask=m_head)


@triton.jit
def pair_sum(a_plus, a_minus, b_plus, b_minus):
    return a_plus + b_plus, a_minus + b_minus


@triton.jit
def _pair_max(a_one, a_two, b_one, b_two):
    return tl.maximum(a_one, b_one), tl.maximum(a_two, b_two)


@triton.jit
def _store_own(states, ring, length, b_own_k, b_own_v, o_dim, c: tl.constexpr):
    """The token's own key and value to their slot of the ring."""
    if c.CODES:
        o_one = tl.arange(0, 1)
        o_own = ring + (length & (2 * c.C - 1)) + o_one
        b_one = b_own_k[None, :]
        store_rows(states.window_key, states.window_key_scale, o_own, b_one, o_one == 0, o_dim, c.D, c.CODES)
        b_one = b_own_v[None, :]
        store_rows(states.window_value, states.window_value_scale, o_own, b_one, o_one == 0, o_dim, c.D, c.CODES)
    else:
        o_to = (ring + (length & (2 * c.C - 1))) * c.D + o_dim
        tl.store(states.window_key + o_to, b_own_k, mask=o_dim < c.D)
        tl.store(states.window_value + o_to, b_own_v, mask=o_dim < c.D)


@triton.jit
def window_part(
    at, states, heads, i_head, i_kv, i_part, p_q, p_k, p_v, phantom, scale2, p_acc, p_ml, p_window, c: tl.constexpr
):
    """BL slots of the ring for one query head; part 0 adds the token itself. p_window gets what the score needs.

    That is (maximum, sum) of the window's other logits, then the own logit, or with RELEASED part 0 the whole score. All slots
    are loaded, before the length is known: which of them count is seen to afterwards.
    """
    o_dim = tl.arange(0, c.DP)
    m_dim = o_dim < c.D
    ring = (at.row * heads.HK + i_kv) * (2 * c.C)
    o_slot = i_part * c.BL + tl.arange(0, c.BL)
    o_row = (ring + o_slot)[:, None] * c.D + o_dim[None, :]
    b_k = tl.load(states.window_key + o_row, mask=m_dim[None, :], other=0.0)
    b_v = tl.load(states.window_value + o_row, mask=m_dim[None, :], other=0.0)
    b_k = as_numbers(b_k, states.window_key_scale, ring + o_slot, o_slot >= 0, p_k.dtype.element_ty, c.CODES)
    b_v = as_numbers(b_v, states.window_value_scale, ring + o_slot, o_slot >= 0, p_k.dtype.element_ty, c.CODES)
    b_q = tl.load(p_q + o_dim, mask=m_dim, other=0.0).to(tl.float32) * scale2
    b_own_k = tl.load(p_k + o_dim, mask=m_dim, other=0.0)
    b_own_v = tl.load(p_v + o_dim, mask=m_dim, other=0.0)
    length, live, promoting = step_of(at, c)
    chunk = length // c.C
    o_back = (length - 1 - o_slot) & (2 * c.C - 1)
    o_position = length - 1 - o_back
    m_row = (o_position >= 0) & (o_position >= (chunk - 1) * c.C)
    m_window = m_row & (o_position > length - c.C)
    own = tl.sum(rounded(b_q, b_own_k.to(tl.float32)), 0)
    b_logit = tl.where(m_row, tl.sum(b_k.to(tl.float32) * b_q[None, :], 1), FAR)
    top, others = tl.reduce((b_logit, tl.where(m_window, b_logit, FAR)), 0, _pair_max)
    if i_part == 0:
        top = tl.maximum(top, own)
        if phantom != 0 and chunk == 0:
            top = tl.maximum(top, 0.0)
    b_p = tl.where(m_row, tl.exp2(b_logit - top), 0.0)
    b_other = tl.where(m_window, tl.exp2(b_logit - others), 0.0)
    total, others_sum = tl.reduce((b_p, b_other), 0, pair_sum)
    b_total = tl.sum(tl.where(m_row[:, None], b_p[:, None] * b_v.to(tl.float32), 0.0), 0)
    if i_part == 0:
        own_p = tl.exp2(own - top)
        total += own_p
        b_total += own_p * b_own_v.to(tl.float32)
        if phantom != 0 and chunk == 0:
            total += c.C * tl.exp2(-top)
    tl.store(p_acc + o_dim, b_total, mask=m_dim)
    tl.store(p_ml, top)
    tl.store(p_ml + 1, total)
    tl.store(p_window, others)
    tl.store(p_window + 1, others_sum)
    tl.store(p_window + 2, own)
    if c.RELEASED:
        if i_part == 0:
            tl.store(p_window + 3, _released_score(b_q, own, length, ring, states, p_k.dtype.element_ty, c))
    if live & (promoting == 0) & (i_part == 0) & (i_head % heads.G == 0):
        # Nothing reads the token's slot, unless its old chunk is being promoted: then the last program writes it.
        _store_own(states, ring, length, b_own_k, b_own_v, o_dim, c)


@triton.jit
def window_group(
    at, states, heads, i_kv, i_part, p_q, p_k, p_v, phantom, scale2, p_acc, p_ml, PARTS, p_window, c: tl.constexpr
):
    """The same for the G query heads of a key/value head, which read the slots once; not with RELEASED.

    p_q: The first of these heads; their partial results lie PARTS apart, what the score needs 4 WP.
    """
    o_dim = tl.arange(0, c.DP)
    m_dim = o_dim < c.D
    o_head = tl.arange(0, c.GP)
    m_head = o_head < heads.G
    m_tile = m_head[:, None] & m_dim[None, :]
    ring = (at.row * heads.HK + i_kv) * (2 * c.C)
    o_slot = i_part * c.BL + tl.arange(0, c.BL)
    o_row = (ring + o_slot)[:, None] * c.D + o_dim[None, :]
    b_k = tl.load(states.window_key + o_row, mask=m_dim[None, :], other=0.0)
    b_v = tl.load(states.window_value + o_row, mask=m_dim[None, :], other=0.0)
    b_k = as_numbers(b_k, states.window_key_scale, ring + o_slot, o_slot >= 0, p_k.dtype.element_ty, c.CODES)
    b_v = as_numbers(b_v, states.window_value_scale, ring + o_slot, o_slot >= 0, p_k.dtype.element_ty, c.CODES)
    b_q = tl.load(p_q + o_head[:, None] * c.D + o_dim[None, :], mask=m_tile, other=0.0)
    b_own_k = tl.load(p_k + o_dim, mask=m_dim, other=0.0)
    b_own_v = tl.load(p_v + o_dim, mask=m_dim, other=0.0)
    length, live, promoting = step_of(at, c)
    chunk = length // c.C
    o_back = (length - 1 - o_slot) & (2 * c.C - 1)
    o_position = length - 1 - o_back
    m_row = (o_position >= 0) & (o_position >= (chunk - 1) * c.C)
    m_window = m_row & (o_position > length - c.C)
    b_own = tl.sum(rounded(b_q.to(tl.float32), b_own_k.to(tl.float32)[None, :]), 1) * scale2
    b_k = tl.where(m_row[:, None], b_k, 0.0)  # what others have left there may be anything
    b_v = tl.where(m_row[:, None], b_v, 0.0)
    b_logit = tl.dot(b_q, tl.trans(b_k), input_precision=c.DOT) * scale2
    b_others = tl.max(tl.where(m_window[None, :], b_logit, FAR), 1)
    b_logit = tl.where(m_row[None, :], b_logit, FAR)
    b_top = tl.max(b_logit, 1)
    if i_part == 0:
        b_top = tl.maximum(b_top, b_own)
        if phantom != 0 and chunk == 0:
            b_top = tl.maximum(b_top, 0.0)
    b_p = tl.where(m_row[None, :], tl.exp2(b_logit - b_top[:, None]), 0.0)
    b_others_sum = tl.sum(tl.where(m_window[None, :], tl.exp2(b_logit - b_others[:, None]), 0.0), 1)
    b_total = tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=c.DOT)
    if i_part == 0:
        b_own_p = tl.exp2(b_own - b_top)
        b_total += b_own_p
        b_acc += b_own_p[:, None] * b_own_v.to(tl.float32)[None, :]
        if phantom != 0 and chunk == 0:
            b_total += c.C * tl.exp2(-b_top)
    tl.store(p_acc + o_head[:, None] * PARTS * c.D + o_dim[None, :], b_acc, mask=m_tile)
    tl.store(p_ml + o_head * PARTS * 2, b_top, mask=m_head)
    tl.store(p_ml + o_head * PARTS * 2 + 1, b_total, mask=m_head)
    p_window += o_head * (4 * c.WP)
    tl.store(p_window, b_others, mask=m_head)
    tl.store(p_window + 1, b_others_sum, mask=m_head)
    tl.store(p_window + 2, b_own, mask=m_head)
    if live & (promoting == 0) & (i_part == 0):
        _store_own(states, ring, length, b_own_k, b_own_v, o_dim, c)


@triton.jit
def _released_score(b_q, own, length, ring, states, KIND: tl.constexpr, c: tl.constexpr):
    """Score of the released training code for the new token; the window covers every slot modulo C once."""
    BN: tl.constexpr = 32
    C: tl.constexpr = c.C
    o_dim = tl.arange(0, c.DP)
    b_max = tl.full([BN], FAR, tl.float32)
    b_sum = tl.zeros([BN], tl.float32)
    for s in range(0, C, BN):
        o_back = s + tl.arange(0, BN)
        m_old = (o_back > 0) & (length - o_back >= 0)
        b_logit = _ring_logits(b_q, length - o_back, m_old, ring, states, o_dim, KIND, c)
        b_new = tl.maximum(b_max, tl.where(m_old, b_logit, FAR))
        b_sum = b_sum * tl.exp2(b_max - b_new) + tl.where(m_old, tl.exp2(b_logit - b_new), 0.0)
        b_max = b_new
    others = tl.max(b_max, 0)
    others_sum = tl.sum(rounded(b_sum, tl.exp2(b_max - others)), 0)
    top = tl.maximum(others, own)
    total = others_sum * tl.exp2(others - top) + tl.exp2(own - top)
    score = own * 0.0
    for s in range(0, C, BN):
        o_back = s + tl.arange(0, BN)  # age: 0 is the token itself
        o_position = length - o_back
        m_in = o_position >= 0
        m_old = m_in & (o_back > 0)
        b_logit = _ring_logits(b_q, o_position, m_old, ring, states, o_dim, KIND, c)
        b_logit = tl.where(o_back == 0, own, b_logit)
        b_p = tl.where(m_in, tl.exp2(b_logit - top) / total, 0.0)
        b_without = tl.where(m_old, tl.exp2(b_logit - others) / others_sum, 0.0)
        b_p = (b_p + RELEASED_EPSILON) / (1 + C * RELEASED_EPSILON)
        b_without = (b_without + RELEASED_EPSILON) / (1 + C * RELEASED_EPSILON + 1.0 / C)
        b_without = tl.where((o_position & (C - 1)) == C - 1, 1.0 / C + RELEASED_EPSILON, b_without)
        score += tl.sum(b_p * tl.log(b_p / (b_without + RELEASED_EPSILON)), 0)
    return score


@triton.jit
def _ring_logits(b_q, o_position, m_row, ring, states, o_dim, KIND: tl.constexpr, c: tl.constexpr):
    """Logits (log2 units) of the scaled query to ring rows at absolute positions; 0 outside m_row."""
    o_slot = ring + (o_position & (2 * c.C - 1))
    o_row = o_slot[:, None] * c.D + o_dim[None, :]
    b_k = tl.load(states.window_key + o_row, mask=m_row[:, None] & (o_dim < c.D)[None, :], other=0.0)
    b_k = as_numbers(b_k, states.window_key_scale, o_slot, m_row, KIND, c.CODES)
    return tl.sum(b_k.to(tl.float32) * b_q[None, :], 1)


@triton.jit
def fresh_part(at, states, heads, i_kv, g, p_q, room, scale2, p_acc, p_ml, c: tl.constexpr):
    """Rows that enter the cache in this step: their softmax, and their copies for later steps; an empty part in a plain step."""
    o_dim = tl.arange(0, c.DP)
    m_dim = o_dim < c.D
    length, _live, promoting = step_of(at, c)
    if c.FUSED and promoting:
        old = length // c.C - 2
        b_q = tl.load(p_q + o_dim, mask=m_dim, other=0.0).to(tl.float32) * scale2
        b_selected = select_chunk(
            states.window_score, states.window_score, old, length, length, 0, at.row, heads.i_select, heads.H, heads.GR,
            room.K, c.SCOPE, c.GP, c.C,
        )  # fmt: skip
        o_rank = tl.arange(0, c.KP)
        m_rank = (o_rank < room.K) & (old * room.K + o_rank < room.N)
        o_from = (at.row * heads.HK + i_kv) * (2 * c.C) + (old & 1) * c.C + selected_offsets(b_selected, c.KP, c.C)
        o_row = o_from[:, None] * c.D + o_dim[None, :]
        mask = m_rank[:, None] & m_dim[None, :]
        b_k = tl.load(states.window_key + o_row, mask=mask, other=0.0)
        b_v = tl.load(states.window_value + o_row, mask=mask, other=0.0)
        if g == 0:
            base = (at.row * heads.HS + heads.i_select) * room.N
            b_key = rows_of(
                states.salient_key, at.p_state_row, at.i_batch, base, heads.i_select, old * room.K, o_rank, m_rank, 0, c.D, c.PAGES
            )  # fmt: skip
            b_value = rows_of(
                states.salient_value, at.p_state_row, at.i_batch, base, heads.i_select, old * room.K, o_rank, m_rank, 1, c.D, c.PAGES
            )  # fmt: skip
            tl.store(states.salient_key + (b_key[:, None] * c.D + o_dim[None, :]), b_k, mask=mask)
            tl.store(states.salient_value + (b_value[:, None] * c.D + o_dim[None, :]), b_v, mask=mask)
            if c.CODES:
                b_key = rows_of(
                    states.salient_key_scale, at.p_state_row, at.i_batch, base, heads.i_select, old * room.K, o_rank, m_rank, 0, 1, c.PAGES
                )  # fmt: skip
                b_value = rows_of(
                    states.salient_value_scale, at.p_state_row, at.i_batch, base, heads.i_select, old * room.K, o_rank, m_rank, 1, 1,
                    c.PAGES,
                )  # fmt: skip
                b_scale = tl.load(states.window_key_scale + o_from, mask=m_rank, other=0.0)
                tl.store(states.salient_key_scale + b_key, b_scale, mask=m_rank)
                b_scale = tl.load(states.window_value_scale + o_from, mask=m_rank, other=0.0)
                tl.store(states.salient_value_scale + b_value, b_scale, mask=m_rank)
        b_k = as_numbers(b_k, states.window_key_scale, o_from, m_rank, p_q.dtype.element_ty, c.CODES)
        b_v = as_numbers(b_v, states.window_value_scale, o_from, m_rank, p_q.dtype.element_ty, c.CODES)
        b_logit = tl.where(m_rank, tl.sum(b_k.to(tl.float32) * b_q[None, :], 1), FAR)
        top = tl.max(b_logit, 0)
        b_p = tl.where(m_rank, tl.exp2(b_logit - top), 0.0)
        tl.store(p_acc + o_dim, tl.sum(rounded(b_p[:, None], b_v.to(tl.float32)), 0), mask=m_dim)
        tl.store(p_ml, top)
        tl.store(p_ml + 1, tl.sum(b_p, 0))
    else:
        tl.store(p_acc + o_dim, tl.zeros([c.DP], tl.float32), mask=m_dim)
        tl.store(p_ml, FAR)
        tl.store(p_ml + 1, 0.0)
