"""The linear state along the chunks for sm_90, like `triton_scan.scan_kernel`: one warp copies by TMA and two groups of four warps
multiply.

A program has 128 features by 64 columns of S of one head in registers, 64 features in each group, and iterates over the chunks. Features
and values of the next chunks are copied through a ring of slots meanwhile.
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

from still_kernels.common.triton_shared import ROWS
from still_kernels.hybrid_attention.sm90.gluon_common import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    fill_rows,
    meet,
    row_of_call,
    send,
)

SB = gl.constexpr(64)
"""Features of a group, columns of a program, and rows and columns of the boxes."""
Barriers = namedtuple("Barriers", "phi_full phi_empty v_full v_empty")
"""Whether slots of features and values are full or empty."""
Sizes = namedtuple("Sizes", "T H HK first_tile n_tiles")
"""Integers of the call."""
Constants = namedtuple("Constants", "C D F SLOTS RAGGED CODES")
"""Constants of a build of the kernel."""


@gluon.jit
def _chunks(at, n: Sizes, c: gl.constexpr):
    """row, start, length as of `row_of`; end of the row's tokens; the first chunk, and how many chunks there are to walk over."""
    row, start, length, count = row_of_call(gl.program_id(2), *at, n.T, c.RAGGED)
    end = length + count
    c0 = length // c.C + n.first_tile
    number = gl.where(count > 0, gl.minimum(n.n_tiles, (end + c.C - 1) // c.C - c0), 0)
    return row, start, length, end, c0, number


@gluon.jit
def _produce(d_value, d_phi_k, phi_buffer, v_buffer, bars, at, n: Sizes, c: gl.constexpr):
    """The warp that copies: features and values of the chunks that are promoted."""
    i_head = gl.program_id(1)
    i_batch = gl.program_id(2)
    i_feature = gl.program_id(0) // (c.D // SB) * (2 * SB)
    i_column = gl.program_id(0) % (c.D // SB) * SB
    _row, start, length, _end, c0, number = _chunks(at, n, c)
    entry = 0
    for j in range(number):
        chunk = c0 + j
        if (chunk >= 2) & (chunk * c.C >= length):
            slot = entry % c.SLOTS
            phase = ((entry // c.SLOTS) & 1) ^ 1
            mbarrier.wait(bars.phi_empty.index(slot), phase)
            mbarrier.expect(bars.phi_full.index(slot), 2 * d_phi_k.block_type.nbytes)
            known = ((i_batch * n.n_tiles + j) * n.H + i_head) * c.C
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    d_phi_k,
                    [known, i_feature + half * SB],
                    bars.phi_full.index(slot),
                    phi_buffer.index(2 * slot + half),
                )
            first = (chunk - 2) * c.C
            token, column = (start + first - length).to(gl.int32), i_head // (n.H // n.HK) * c.D + i_column
            send(
                d_value, token, column, v_buffer.index(slot), bars.v_full.index(slot), bars.v_empty.index(slot), phase, first >= length
            )  # fmt: skip
            entry += 1


@gluon.jit
def _consume(
    GROUP: gl.constexpr, d_prefix_kv, phi_buffer, v_buffer, own_buffer, ones, out_buffer, bars, p_value, p_ring_value, p_kv_state,
    p_z_state, at, p_prefix_z, n: Sizes, c: gl.constexpr,
):  # fmt: skip
    """Four warps: 64 features."""
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SB, 16])
    masses: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    values: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i_head = gl.program_id(1)
    i_batch = gl.program_id(2)
    i_feature = gl.program_id(0) // (c.D // SB) * (2 * SB) + GROUP * SB
    i_column = gl.program_id(0) % (c.D // SB) * SB
    own = own_buffer.index(GROUP)
    out = out_buffer.index(GROUP)
    row, start, length, end, c0, number = _chunks(at, n, c)
    if number > 0:
        o_feature = i_feature + gl.arange(0, SB, layout=gl.SliceLayout(1, sums))
        o_column = i_column + gl.arange(0, SB, layout=gl.SliceLayout(0, sums))
        p_state = p_kv_state + (row * n.H + i_head) * (c.F * c.D) + o_feature[:, None] * c.D + o_column[None, :]
        b_state = gl.load(p_state)
        # z by products with ones, in columns that are all equal, from the rounded features that enter S: both keep one ratio.
        o_row = i_feature + gl.arange(0, SB, layout=gl.SliceLayout(1, masses))
        o_copy = gl.arange(0, 16, layout=gl.SliceLayout(0, masses))
        m_mass = (o_copy[None, :] == 0) & (o_row[:, None] >= 0) & (i_column == 0)
        p_z = p_z_state + (row * n.H + i_head) * c.F + o_row[:, None] + 0 * o_copy[None, :]
        b_mass = gl.load(p_z)
        i_kv = i_head // (n.H // n.HK)
        p_new = p_value + (start * n.HK + i_kv) * c.D + i_column
        if c.CODES:
            row = i_batch.to(gl.int64)  # rings are those of the call, unpacked
        p_ring = p_ring_value + (row * n.HK + i_kv) * (2 * c.C) * c.D + i_column
        entry = 0
        for j in range(number):
            chunk = c0 + j
            if (chunk >= 2) & (chunk * c.C >= length):
                slot = entry % c.SLOTS
                phase = (entry // c.SLOTS) & 1
                first = (chunk - 2) * c.C
                b_phi = phi_buffer.index(2 * slot + GROUP).permute((1, 0))
                mbarrier.wait(bars.v_full.index(slot), phase)
                b_value = v_buffer.index(slot)
                if v_buffer.dtype != own_buffer.dtype:
                    b_value = own
                    own.store(v_buffer.index(slot).load(values).to(own_buffer.dtype))
                if first < length:
                    if GROUP == 0 or v_buffer.dtype != own_buffer.dtype:
                        fill_rows(b_value, p_new, p_ring, first, length, end, n.HK * c.D, c.C, SB, c.C, c.D)
                    fence_async_shared()
                    meet(j)
                elif v_buffer.dtype != own_buffer.dtype:
                    fence_async_shared()
                mbarrier.wait(bars.phi_full.index(slot), phase)
                # One product, whatever its values are: with one in each branch ptxas 12.8 takes descriptors that were not computed.
                b_state = warpgroup_mma(b_phi, b_value, b_state, is_async=True)
                b_state = warpgroup_mma_wait(0, deps=[b_state])
                if i_column == 0:
                    b_mass = warpgroup_mma(b_phi, ones, b_mass, is_async=True)
                    b_mass = warpgroup_mma_wait(0, deps=[b_mass])
                mbarrier.arrive(bars.phi_empty.index(slot), count=1)
                mbarrier.arrive(bars.v_empty.index(slot), count=1)
                entry += 1
            if j % 2 == 0:
                i_prefix = ((i_batch * ((n.n_tiles + 1) // 2) + j // 2) * n.H + i_head) * c.F
                tma.store_wait(pendings=0)
                out.store(b_state.to(out_buffer.dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(d_prefix_kv, [i_prefix + i_feature, i_column], out)
                gl.store(p_prefix_z + i_prefix.to(gl.int64) + o_row[:, None] + 0 * o_copy[None, :], b_mass, mask=m_mass)
        gl.store(p_state, b_state)
        gl.store(p_z, b_mass, mask=m_mass)
        tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["T", "H", "HK", "first_tile", "n_tiles"], do_not_specialize_on_alignment=ROWS)
def scan_tma_kernel(
    d_value, d_phi_k, d_prefix_kv, p_value, p_ring_value, p_kv_state, p_z_state, p_new_tokens, p_past_length, p_query_start,
    p_state_row, p_prefix_z,
    T, H, HK, first_tile, n_tiles,
    C: gl.constexpr, D: gl.constexpr, F: gl.constexpr, SLOTS: gl.constexpr, RAGGED: gl.constexpr, CODES: gl.constexpr,
):  # fmt: skip
    """Fold promoted chunks into S and z in chunk order; leave what each chunk c0 + first_tile + 2 i sees. Grid (F / 128 * D / 64, H, B).

    prefix_kv [B, ceil(n_tiles / 2), H, F, D], prefix_z [B, ceil(n_tiles / 2), H, F]. Descriptors (d_): value [tokens, HK * D],
    phi_k [B * n_tiles * H * C, F], prefix_kv [B * ceil(n_tiles / 2) * H * F, D].
    """
    phi_buffer = gl.allocate_shared_memory(d_phi_k.dtype, [2 * SLOTS, C, SB], d_phi_k.layout)
    v_buffer = gl.allocate_shared_memory(d_value.dtype, [SLOTS, C, SB], d_value.layout)
    own_buffer = gl.allocate_shared_memory(d_phi_k.dtype, [2, C, SB], d_phi_k.layout)
    out_buffer = gl.allocate_shared_memory(d_prefix_kv.dtype, [2, SB, SB], d_prefix_kv.layout)
    narrow: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    ones = gl.allocate_shared_memory(d_phi_k.dtype, [C, 16], narrow)
    ones.store(gl.full([C, 16], 1.0, d_phi_k.dtype, layout=rows))
    phi_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    phi_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(phi_full.index(i), count=1)
        mbarrier.init(phi_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    bars = Barriers(phi_full, phi_empty, v_full, v_empty)
    n = Sizes(T, H, HK, first_tile, n_tiles)
    c: gl.constexpr = Constants(C, D, F, SLOTS, RAGGED, CODES)
    gl.warp_specialize(  # what may be None stands in no tuple that has a name
        [
            (_consume, (gl.constexpr(0), d_prefix_kv, phi_buffer, v_buffer, own_buffer, ones, out_buffer, bars, p_value, p_ring_value,
                        p_kv_state, p_z_state, (p_new_tokens, p_past_length, p_query_start, p_state_row), p_prefix_z, n, c)),
            (_consume, (gl.constexpr(1), d_prefix_kv, phi_buffer, v_buffer, own_buffer, ones, out_buffer, bars, p_value, p_ring_value,
                        p_kv_state, p_z_state, (p_new_tokens, p_past_length, p_query_start, p_state_row), p_prefix_z, n, c)),
            (_produce, (d_value, d_phi_k, phi_buffer, v_buffer, bars,
                        (p_new_tokens, p_past_length, p_query_start, p_state_row), n, c)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
