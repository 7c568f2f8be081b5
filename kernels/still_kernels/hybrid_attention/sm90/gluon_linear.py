"""The linear state's contribution to each new query for sm_90, like `triton_linear.linear_kernel`: one warp copies by TMA and two groups of
four warps multiply.

A program processes a row of tiles in order. A tile is two chunks of one head, one for each consumer. Both share the state S that is stored
for the first of them: S is read once, and the next tile's is copied while this one's features are computed. The chunk promoted between the
two enters the second one's result by products of features.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from still_kernels.common.triton_shared import LOG2E, ROWS
from still_kernels.hybrid_attention.sm90.gluon_common import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    fill_rows,
    row_of_call,
    send,
)

FEATURE_FLOOR = gl.constexpr(1e-12)


Buffers = namedtuple("Buffers", "w q s phi v")
"""Shared memory: a projection [P, D], queries [2, C, D], S [2, P, D], features [2, C, P] and values [C, D] of the chunk between."""
Barriers = namedtuple("Barriers", "w_full q_full q_empty s_full s_empty phi_full phi_empty v_full v_empty")
"""Whether buffers are full or empty."""
Sizes = namedtuple("Sizes", "T H HK W_HEADS first_tile n_tiles B")
"""Integers of the call."""
Constants = namedtuple("Constants", "C D P FEATURE RAGGED CODES")
"""Constants of a build of the kernel."""


@gluon.jit
def _turns_of(groups, H, B):
    """Of `groups` tiles of each head and row, those of this program: i_batch, i_head, number in its head of the first; how many."""
    i_program = gl.program_id(0)
    programs = gl.num_programs(0)
    total = groups * H * B
    share = total // programs
    more = total - share * programs
    begin = i_program * share + gl.minimum(i_program, more)
    i_head = begin // groups
    return i_head // H, i_head % H, begin - i_head * groups, share + (i_program < more).to(gl.int32)


@gluon.jit
def _next_turn(i_batch, i_head, group, groups, H):
    """The tile behind this one; without divisions, which take as long as a tenth of a tile."""
    group += 1
    wraps = group == groups
    i_head += wraps.to(gl.int32)
    ends = i_head == H
    return i_batch + ends.to(gl.int32), gl.where(ends, 0, i_head), gl.where(wraps, 0, group)


@gluon.jit
def _feature_scale(b_x, b_square, FEATURE: gl.constexpr):
    """What multiplies projections [rows, P] before their exponential in base 2; b_square: squared norms of the inputs, [rows]."""
    b_scale = gl.zeros_like(b_square) + LOG2E
    if FEATURE == 0:
        b_scale = b_scale * gl.sqrt(b_square) / gl.maximum(gl.sqrt(gl.sum(b_x * b_x, 1)), FEATURE_FLOOR)
    return b_scale


@gluon.jit
def _half_of_features(b_x, b_scale):
    """One half of phi, softmax(scale x) of projections [rows, P]."""
    b_e = gl.exp2(b_x * b_scale[:, None] - (gl.max(b_x, 1) * b_scale)[:, None])
    return gl.maximum(b_e * (1.0 / gl.sum(b_e, 1))[:, None], FEATURE_FLOOR)


@gluon.jit
def _tile(i_batch, group, at, n: Sizes, c: gl.constexpr):
    """Where tile `group` of a head lies; whether a query of it sees S, and whether a chunk was promoted between its two."""
    row, start, length, count = row_of_call(i_batch, *at, n.T, c.RAGGED)
    if c.CODES:
        row = i_batch.to(gl.int64)  # rings are those of the call, unpacked
    end = length + count
    chunk = length // c.C + n.first_tile + 2 * group
    live = (count > 0) & (chunk >= 1) & (chunk * c.C < end)
    promoted = live & ((chunk + 1) * c.C < end) & (2 * group + 1 < n.n_tiles)
    return row, start, length, end, chunk, live, promoted


@gluon.jit
def _produce(d_query, d_value, d_feature_q_weight, d_phi_k, d_prefix_kv, held, bars, at, n: Sizes, c: gl.constexpr):
    """The warp that copies: of each tile queries and S, features and values of the chunk between; projections when the head changes."""
    number = 0  # of the tile among those with queries
    pairs = 0  # tiles with a chunk between
    projection = -1
    groups = (n.n_tiles + 1) // 2
    i_batch, i_head, group, turns = _turns_of(groups, n.H, n.B)
    for _ in range(turns):
        _row, start, length, _end, chunk, live, promoted = _tile(i_batch, group, at, n, c)
        if live:
            phase = (number & 1) ^ 1
            for g in gl.static_range(2):
                mbarrier.wait(bars.q_empty.index(g), phase)
            if gl.where(n.W_HEADS > 1, i_head, 0) != projection:  # who has read its queries has multiplied them
                projection = gl.where(n.W_HEADS > 1, i_head, 0)
                mbarrier.expect(bars.w_full, d_feature_q_weight.block_type.nbytes)
                tma.async_copy_global_to_shared(d_feature_q_weight, [projection * c.P, 0], bars.w_full, held.w)
            token = (start + chunk * c.C - length).to(gl.int32)
            for g in gl.static_range(2):
                mbarrier.expect(bars.q_full.index(g), d_query.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    d_query, [token + g * c.C, i_head * c.D], bars.q_full.index(g), held.q.index(g)
                )
            state = ((i_batch * groups + group) * n.H + i_head) * (2 * c.P)
            for half in gl.static_range(2):
                send(
                    d_prefix_kv, state + half * c.P, 0, held.s.index(half), bars.s_full.index(half), bars.s_empty.index(half), phase, True
                )  # fmt: skip
            if promoted:
                phase = (pairs & 1) ^ 1
                known = ((i_batch * n.n_tiles + 2 * group + 1) * n.H + i_head) * c.C
                for half in gl.static_range(2):
                    send(
                        d_phi_k, known, half * c.P, held.phi.index(half), bars.phi_full.index(half), bars.phi_empty.index(half), phase, True
                    )  # fmt: skip
                column = i_head // (n.H // n.HK) * c.D
                inside = (chunk - 1) * c.C >= length
                send(d_value, token - c.C, column, held.v, bars.v_full, bars.v_empty, phase, inside)
                pairs += 1
            number += 1
        i_batch, i_head, group = _next_turn(i_batch, i_head, group, groups, n.H)


@gluon.jit
def _consume(
    GROUP: gl.constexpr, d_linear, held, out_buffer, bars, p_value, p_ring_value, at, p_prefix_z, p_linear_sum, n: Sizes,
    c: gl.constexpr,
):  # fmt: skip
    """Four warps: chunk GROUP of each tile."""
    features: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, c.P, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, c.D, 16])
    keys: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, c.C, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    rows: gl.constexpr = gl.SliceLayout(1, features)
    o_feature = gl.arange(0, c.P, layout=gl.SliceLayout(0, features))
    o_row = gl.arange(0, c.C, layout=rows)
    query = held.q.index(GROUP)
    out = out_buffer.index(GROUP)
    number = 0
    pairs = 0
    projection = -1
    projections = 0  # that were copied
    groups = (n.n_tiles + 1) // 2
    i_batch, i_head, group, turns = _turns_of(groups, n.H, n.B)
    for _ in range(turns):
        row, start, length, end, chunk, live, promoted = _tile(i_batch, group, at, n, c)
        if live:
            i_state = (i_batch * groups + group) * n.H + i_head
            p_z = p_prefix_z + i_state.to(gl.int64) * (2 * c.P) + o_feature
            b_z = gl.load(p_z)
            b_z2 = gl.load(p_z + c.P)
            if gl.where(n.W_HEADS > 1, i_head, 0) != projection:
                projection = gl.where(n.W_HEADS > 1, i_head, 0)
                projections += 1
            mbarrier.wait(bars.w_full, (projections - 1) & 1)
            mbarrier.wait(bars.q_full.index(GROUP), number & 1)
            b_x = warpgroup_mma(
                query,
                held.w.permute((1, 0)),
                gl.zeros([c.C, c.P], gl.float32, layout=features),
                use_acc=False,
                is_async=True,
            )
            b_query = query.load(features if c.P == c.D else sums).to(gl.float32)
            b_square = gl.convert_layout(gl.sum(b_query * b_query, 1), rows)
            b_x = warpgroup_mma_wait(0, deps=[b_x])
            mbarrier.arrive(bars.q_empty.index(GROUP), count=1)
            b_scale = _feature_scale(b_x, b_square, c.FEATURE)
            b_phi = _half_of_features(b_x, b_scale)
            b_sum = gl.sum(b_phi * b_z[None, :], 1)
            b_plus = gl.convert_layout(b_phi.to(held.s.dtype), operand)
            b_phi = _half_of_features(-b_x, b_scale)
            b_sum += gl.sum(b_phi * b_z2[None, :], 1)
            b_minus = gl.convert_layout(b_phi.to(held.s.dtype), operand)

            mbarrier.wait(bars.s_full.index(0), number & 1)
            b_acc = warpgroup_mma(
                b_plus, held.s.index(0), gl.zeros([c.C, c.D], gl.float32, layout=sums), use_acc=False, is_async=True
            )
            mbarrier.wait(bars.s_full.index(1), number & 1)
            b_acc = warpgroup_mma(b_minus, held.s.index(1), b_acc, is_async=True)
            b_acc, b_plus, b_minus = warpgroup_mma_wait(0, deps=[b_acc, b_plus, b_minus])
            mbarrier.arrive(bars.s_empty.index(0), count=1)
            mbarrier.arrive(bars.s_empty.index(1), count=1)
            if GROUP == 1:
                if promoted:  # (phi(q) phi(k)^n.T) v of the chunk between
                    mbarrier.wait(bars.phi_full.index(0), pairs & 1)
                    b_dot = warpgroup_mma(
                        b_plus,
                        held.phi.index(0).permute((1, 0)),
                        gl.zeros([c.C, c.C], gl.float32, layout=keys),
                        use_acc=False,
                        is_async=True,
                    )
                    mbarrier.wait(bars.phi_full.index(1), pairs & 1)
                    b_dot = warpgroup_mma(b_minus, held.phi.index(1).permute((1, 0)), b_dot, is_async=True)
                    b_dot, b_plus, b_minus = warpgroup_mma_wait(0, deps=[b_dot, b_plus, b_minus])
                    mbarrier.arrive(bars.phi_empty.index(0), count=1)
                    mbarrier.arrive(bars.phi_empty.index(1), count=1)
                    b_sum += gl.convert_layout(gl.sum(b_dot, 1), rows)
                    b_pair = gl.convert_layout(b_dot.to(held.v.dtype), operand)
                    mbarrier.wait(bars.v_full, pairs & 1)
                    first = (chunk - 1) * c.C
                    if first < length:
                        i_kv = i_head // (n.H // n.HK)
                        p_new = p_value + (start * n.HK + i_kv) * c.D
                        p_ring = p_ring_value + (row * n.HK + i_kv) * (2 * c.C) * c.D
                        fill_rows(held.v, p_new, p_ring, first, length, end, n.HK * c.D, c.C, c.D, c.C, c.D)
                        fence_async_shared()
                    b_acc = warpgroup_mma(b_pair, held.v, b_acc, is_async=True)
                    b_acc, b_pair = warpgroup_mma_wait(0, deps=[b_acc, b_pair])
                    mbarrier.arrive(bars.v_empty, count=1)
                    pairs += 1

            if (chunk + GROUP >= 2) & (2 * group + GROUP < n.n_tiles):
                i_tile = ((i_batch * n.n_tiles + 2 * group + GROUP) * n.H + i_head) * c.C
                gl.store(p_linear_sum + i_tile.to(gl.int64) + o_row, b_sum)
                tma.store_wait(pendings=0)
                out.store(b_acc.to(out_buffer.dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(d_linear, [i_tile, 0], out)
            number += 1
        i_batch, i_head, group = _next_turn(i_batch, i_head, group, groups, n.H)
    tma.store_wait(pendings=0)


@gluon.jit(
    do_not_specialize=["B", "T", "H", "HK", "W_HEADS", "first_tile", "n_tiles"], do_not_specialize_on_alignment=ROWS
)
def linear_tma_kernel(
    d_query, d_value, d_feature_q_weight, d_phi_k, d_prefix_kv, d_linear, p_value, p_ring_value, p_new_tokens, p_past_length,
    p_query_start, p_state_row, p_prefix_z, p_linear_sum,
    B, T, H, HK, W_HEADS, first_tile, n_tiles,
    C: gl.constexpr, D: gl.constexpr, P: gl.constexpr, FEATURE: gl.constexpr, RAGGED: gl.constexpr, CODES: gl.constexpr,
):  # fmt: skip
    """phi(q)^T S and phi(q)^T z of chunks c0 + first_tile .. + n_tiles - 1, B rows, H heads. Any number of programs shares the tiles.

    Writes linear [B, n_tiles, H, C, D] and linear_sum [B, n_tiles, H, C], nothing for chunks 0 and 1; S and z are stored for every
    second chunk, features have two halves of P. Descriptors (d_): query [tokens, H * D], value [tokens, HK * D], feature_q_weight
    [W_HEADS * P, D], phi_k [B * n_tiles * H * C, 2 * P], prefix_kv [B * ceil(n_tiles / 2) * H * 2 * P, D], linear [B * n_tiles * H * C,
    D].
    """
    w_buffer = gl.allocate_shared_memory(d_feature_q_weight.dtype, [P, D], d_feature_q_weight.layout)
    q_buffer = gl.allocate_shared_memory(d_query.dtype, [2, C, D], d_query.layout)
    s_buffer = gl.allocate_shared_memory(d_prefix_kv.dtype, [2, P, D], d_prefix_kv.layout)
    phi_buffer = gl.allocate_shared_memory(d_phi_k.dtype, [2, C, P], d_phi_k.layout)
    v_buffer = gl.allocate_shared_memory(d_value.dtype, [C, D], d_value.layout)
    out_buffer = gl.allocate_shared_memory(d_linear.dtype, [2, C, D], d_linear.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    s_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    s_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    phi_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    phi_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    single = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    w_full = single.index(0)
    v_full = single.index(1)
    v_empty = single.index(2)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(s_full.index(i), count=1)
        mbarrier.init(s_empty.index(i), count=2)
        mbarrier.init(phi_full.index(i), count=1)
        mbarrier.init(phi_empty.index(i), count=1)
    for i in gl.static_range(3):
        mbarrier.init(single.index(i), count=1)
    fence_async_shared()
    held = Buffers(w_buffer, q_buffer, s_buffer, phi_buffer, v_buffer)
    bars = Barriers(w_full, q_full, q_empty, s_full, s_empty, phi_full, phi_empty, v_full, v_empty)
    n = Sizes(T, H, HK, W_HEADS, first_tile, n_tiles, B)
    c: gl.constexpr = Constants(C, D, P, FEATURE, RAGGED, CODES)
    gl.warp_specialize(  # what may be None stands in no tuple that has a name
        [
            (_consume, (gl.constexpr(0), d_linear, held, out_buffer, bars, p_value, p_ring_value,
                        (p_new_tokens, p_past_length, p_query_start, p_state_row), p_prefix_z, p_linear_sum, n, c)),
            (_consume, (gl.constexpr(1), d_linear, held, out_buffer, bars, p_value, p_ring_value,
                        (p_new_tokens, p_past_length, p_query_start, p_state_row), p_prefix_z, p_linear_sum, n, c)),
            (_produce, (d_query, d_value, d_feature_q_weight, d_phi_k, d_prefix_kv, held, bars,
                        (p_new_tokens, p_past_length, p_query_start, p_state_row), n, c)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
