"""Local, salient and linear attention of prefill for sm_90, like `triton_attend.attend_kernel`: one warp copies by TMA and two groups of
four warps multiply.

A program processes several tiles in order: 128 queries of one head, 64 for each consumer, which is one chunk. Keys and values come in
blocks of 128 through a ring of slots that both consumers share: the window of the first consumer, that of the second, then the salient
cache. A consumer that does not use a block still waits for it and releases it.

A window that reaches into the state's ring or beyond the row's tokens is not copied by TMA. Its consumer writes it into the empty slot,
with zeros at absent positions, because a weight of 0 times arbitrary memory need not be 0. Triton's interpreter cannot run Gluon.
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
    meet,
    row_of_call,
)

BM = gl.constexpr(64)
"""Queries of a consumer, and rows of the box of queries, gates, outputs and linear parts."""
BN = gl.constexpr(128)
"""Keys of a block, and rows of the box of keys and values."""
HEADS = gl.constexpr(8)
"""Query heads with consecutive tiles, so that shared inputs are still in L2."""
Buffers = namedtuple("Buffers", "query key value linear out")
"""Shared memory: [2, BM, D] for the consumers' queries, linear parts, and gates that outputs later replace; [SLOTS, BN, D]."""
Barriers = namedtuple("Barriers", "q_full q_empty k_full k_empty v_full v_empty end_full end_empty")
"""Whether buffers are full or empty; `end` is for linear parts and gates."""
Sizes = namedtuple("Sizes", "T H HK HS K N first_tile n_tiles total")
"""Integers of the call."""
Constants = namedtuple("Constants", "C D SLOTS GATE FACTOR RAGGED PAGES CODES")
"""Constants of a build of the kernel."""


@gluon.jit
def _turn(NAME: gl.constexpr, x):
    """Meet the other consumer, or let it go on, at the barrier that the instruction names."""
    gl.inline_asm_elementwise(NAME + ", 256; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _take_turn(GROUP: gl.constexpr, x):
    """Wait until the other consumer has issued its products."""
    _turn("bar.sync 10" if GROUP == 0 else "bar.sync 11", x)


@gluon.jit
def _give_turn(GROUP: gl.constexpr, x):
    """Let the other consumer issue its products."""
    _turn("bar.arrive 11" if GROUP == 0 else "bar.arrive 10", x)


@gluon.jit
def _turns(total):
    """Tiles of this program. Odd rounds go through the programs backwards, so that long tiles are shared out evenly."""
    programs = gl.num_programs(0)
    i_program = gl.program_id(0)
    full = total // programs
    last = gl.where((full & 1) == 1, programs - 1 - i_program, i_program)
    return full + (last < total - full * programs).to(gl.int32)


@gluon.jit
def _tile(turn, at, n: Sizes, c: gl.constexpr):
    """The tile of a turn, the same for all roles; `limit` ends what the segment writes, `blocks` of the cache are seen at least in part."""
    programs = gl.num_programs(0)
    i_program = gl.program_id(0)
    n_blocks = (n.n_tiles * c.C + 2 * BM - 1) // (2 * BM)
    place = turn * programs + gl.where((turn & 1) == 1, programs - 1 - i_program, i_program)
    i_batch = place // (n_blocks * n.H)
    place -= i_batch * (n_blocks * n.H)
    group = place // (n_blocks * HEADS)
    place -= group * (n_blocks * HEADS)
    heads = gl.minimum(HEADS, n.H - group * HEADS)
    i_head = group * HEADS + place % heads
    row, start, length, count = row_of_call(i_batch, *at, n.T, c.RAGGED, c.PAGES != 0)
    if c.CODES:
        row = i_batch.to(gl.int64)  # ring and cache are those of the call, unpacked
    c0 = length // c.C + n.first_tile
    first = c0 * c.C + (n_blocks - 1 - place // heads) * (2 * BM)  # the longest first
    end = length + count
    span = count if c.RAGGED else n.T
    limit = gl.minimum(length + span, (c0 + n.n_tiles) * c.C)
    live = (count > 0) & (first < end)
    last_chunk = (gl.minimum(first + 2 * BM, end) - 1) // c.C
    blocks = (gl.minimum(gl.maximum(last_chunk - 1, 0) * n.K, n.N) + BN - 1) // BN
    return i_batch, i_head, row, start, length, end, first, c0, limit, live, blocks


@gluon.jit
def _send(desc, at, column, buffer, full, empty, entry, pred, SLOTS: gl.constexpr):
    """Block `entry` by TMA into its slot once that is empty; where not `pred` the slot is handed over as it is."""
    slot = entry % SLOTS
    mbarrier.wait(empty.index(slot), ((entry // SLOTS) & 1) ^ 1)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(desc, [at, column], full.index(slot), buffer.index(slot), pred=pred)
    mbarrier.arrive(full.index(slot), count=1, pred=pred ^ True)


@gluon.jit
def _rows_in_pages(p_state_row, i_batch, i_select, slot, D: gl.constexpr, PAGES: gl.constexpr):
    """(first row of a block of salient keys, of salient values), of pages seen as rows of D columns of 16 bits; as `triton_pages` says."""
    p_page = p_state_row + i_batch * PAGES[1] + PAGES[2] + 2 * (slot // PAGES[4])
    row = i_select * PAGES[4] + slot % PAGES[4]
    per_page: gl.constexpr = PAGES[0] // (2 * D)
    return gl.load(p_page) * per_page + row, gl.load(p_page + 1) * per_page + row


@gluon.jit
def _produce(
    d_query, d_key, d_value, d_cached_key, d_cached_value, d_linear, d_gate, held, bars, at, n: Sizes, c: gl.constexpr
):  # fmt: skip
    """The warp that copies: of each tile queries and windows, the cache, then linear parts and gates."""
    entry = 0
    number = 0  # of the tile among those with queries
    for turn in range(_turns(n.total)):
        i_batch, i_head, row, start, length, end, first, c0, _limit, live, blocks = _tile(turn, at, n, c)
        if live:
            phase = (number & 1) ^ 1
            token = (start + first - length).to(gl.int32)
            column = i_head // (n.H // n.HK) * c.D
            for g in gl.static_range(2):
                mbarrier.wait(bars.q_empty.index(g), phase)
                mbarrier.expect(bars.q_full.index(g), d_query.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    d_query, [token + g * BM, i_head * c.D], bars.q_full.index(g), held.query.index(g)
                )
                begin = first + g * BM - c.C
                inside = (begin >= length) & (begin + BN <= end)
                _send(d_key, token + g * BM - c.C, column, held.key, bars.k_full, bars.k_empty, entry, inside, c.SLOTS)
                _send(
                    d_value, token + g * BM - c.C, column, held.value, bars.v_full, bars.v_empty, entry, inside, c.SLOTS
                )
                entry += 1
            cache = ((row * n.HS + i_head // (n.H // n.HS)) * n.N).to(gl.int32)
            for block in range(blocks):
                keys = cache + block * BN
                values = keys
                if c.PAGES != 0:
                    keys, values = _rows_in_pages(at[3], i_batch, i_head // (n.H // n.HS), block * BN, c.D, c.PAGES)
                _send(d_cached_key, keys, 0, held.key, bars.k_full, bars.k_empty, entry, True, c.SLOTS)
                _send(d_cached_value, values, 0, held.value, bars.v_full, bars.v_empty, entry, True, c.SLOTS)
                entry += 1
            tile = i_batch * n.n_tiles + first // c.C - c0
            for g in gl.static_range(2):
                mbarrier.wait(bars.end_empty.index(g), phase)
                if c.GATE:
                    mbarrier.expect(bars.end_full.index(g), d_linear.block_type.nbytes + d_gate.block_type.nbytes)
                    tma.async_copy_global_to_shared(
                        d_gate, [token + g * BM, i_head * c.D], bars.end_full.index(g), held.out.index(g)
                    )
                else:
                    mbarrier.expect(bars.end_full.index(g), d_linear.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    d_linear, [((tile + g) * n.H + i_head) * c.C, 0], bars.end_full.index(g), held.linear.index(g)
                )
            number += 1


@gluon.jit
def _clear(buffer, known, D: gl.constexpr):
    """Zeros in the rows from `known` on. Both consumers do it, so that neither waits for the other's: what they write is the same."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    o_row = gl.arange(0, BN, layout=gl.SliceLayout(1, rows))
    b_rows = buffer.load(rows)
    meet(known)  # who writes first must not change what the other still reads
    buffer.store(gl.where((o_row < known)[:, None], b_rows, gl.zeros_like(b_rows)))


@gluon.jit
def _pass_over(entry, bars, SLOTS: gl.constexpr):
    """Give back block `entry`, which the other consumer alone uses."""
    slot = entry % SLOTS
    phase = (entry // SLOTS) & 1
    mbarrier.wait(bars.k_full.index(slot), phase)
    mbarrier.arrive(bars.k_empty.index(slot), count=1)
    mbarrier.wait(bars.v_full.index(slot), phase)
    mbarrier.arrive(bars.v_empty.index(slot), count=1)


@gluon.jit
def _absorb(
    entry, before, b_acc, b_max, b_sum, b_p, query, held, bars, seen, scale2, GROUP: gl.constexpr, SLOTS: gl.constexpr,
    dots: gl.constexpr, sums: gl.constexpr,
):  # fmt: skip
    """The first `seen` keys of block `entry` into the running softmax, behind them the values of block `before` by their weights b_p."""
    # Weights are carried: accumulators carried around a loop make ptxas wait after each product (C7511).
    k_slot = entry % SLOTS
    v_slot = before % SLOTS
    mbarrier.wait(bars.k_full.index(k_slot), (entry // SLOTS) & 1)
    _take_turn(GROUP, entry)
    b_dot = warpgroup_mma(
        query,
        held.key.index(k_slot).permute((1, 0)),
        gl.zeros([BM, BN], gl.float32, layout=dots),
        use_acc=False,
        is_async=True,
    )
    mbarrier.wait(bars.v_full.index(v_slot), (before // SLOTS) & 1)
    b_next = warpgroup_mma(b_p, held.value.index(v_slot), b_acc, is_async=True)
    _give_turn(GROUP, entry)
    b_dot = warpgroup_mma_wait(1, deps=[b_dot])
    mbarrier.arrive(bars.k_empty.index(k_slot), count=1)
    if seen < BN:
        o_slot = gl.arange(0, BN, layout=gl.SliceLayout(0, dots))
        b_dot = gl.where((o_slot < seen)[None, :], b_dot, float("-inf"))
    b_new = gl.maximum(b_max, gl.max(b_dot, 1))
    b_weight = gl.exp2(b_dot * scale2 - (b_new * scale2)[:, None])
    b_decay = gl.exp2((b_max - b_new) * scale2)
    b_sum = b_sum * b_decay + gl.sum(b_weight, 1)
    b_acc, b_p = warpgroup_mma_wait(0, deps=[b_next, b_p])
    mbarrier.arrive(bars.v_empty.index(v_slot), count=1)
    b_p = gl.convert_layout(b_weight.to(held.value.dtype), gl.DotOperandLayout(0, sums, 2))
    b_acc = b_acc * gl.convert_layout(b_decay, gl.SliceLayout(1, sums))[:, None]
    return b_acc, b_new, b_sum, b_p


@gluon.jit
def _store_rows(
    p_output, b_out, o_query, m_query, start, length, limit, i_head, H, D: gl.constexpr, sums: gl.constexpr
):
    """Outputs of a block that is not all of this call, its tokens from length to limit; zeros of those that are no queries."""
    o_dim = gl.arange(0, D, layout=gl.SliceLayout(0, sums))
    p_tile = p_output + ((start + o_query - length) * H + i_head)[:, None] * D + o_dim[None, :]
    m_store = ((o_query >= length) & (o_query < limit))[:, None] & (o_dim < D)[None, :]
    gl.store(p_tile, gl.where(m_query[:, None], b_out, 0.0).to(p_output.dtype.element_ty), mask=m_store)


@gluon.jit
def _consume(
    GROUP: gl.constexpr, d_output, held, bars, p_key, p_value, p_window_factor, p_ring_key, p_ring_value, at, p_linear_sum, p_output, n,
    phantom, scale2, epsilon, c: gl.constexpr,
):  # fmt: skip
    """Four warps: chunk GROUP of each tile."""
    dots: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, c.D, 16])
    o_row = gl.arange(0, BM, layout=gl.SliceLayout(1, dots))
    o_column = gl.arange(0, BN, layout=gl.SliceLayout(0, dots))
    o_sum = gl.arange(0, BM, layout=gl.SliceLayout(1, sums))
    query = held.query.index(GROUP)
    linear = held.linear.index(GROUP)
    out = held.out.index(GROUP)
    entry = 0
    number = 0
    turns = _turns(n.total)
    if GROUP == 1:
        _give_turn(GROUP, turns)
    for turn in range(turns):
        i_batch, i_head, row, start, length, end, first, c0, limit, live, blocks = _tile(turn, at, n, c)
        first += GROUP * BM
        stop = gl.minimum(end, limit)
        o_query = first + o_sum
        m_query = (o_query >= length) & (o_query < stop)
        if live:
            chunk = first // c.C
            slots = gl.maximum(chunk - 1, 0) * n.K
            seen = gl.minimum(slots, n.N)
            known = gl.minimum(gl.maximum((end - 1) // c.C - 1, 0) * n.K, n.N)  # slots that were ever written
            i_tile = (i_batch * n.n_tiles + chunk - c0) * n.H + i_head
            m_linear = m_query & (chunk >= 2)
            b_linear_sum = gl.load(p_linear_sum + i_tile.to(gl.int64) * c.C + o_sum, mask=m_linear, other=0.0)

            # Window: the previous chunk and the current one up to the query.
            own = entry + GROUP
            slot = own % c.SLOTS
            phase = (own // c.SLOTS) & 1
            if GROUP == 1:
                _pass_over(entry, bars, c.SLOTS)
            begin = first - c.C
            mbarrier.wait(bars.q_full.index(GROUP), number & 1)
            mbarrier.wait(bars.k_full.index(slot), phase)
            if (begin < length) | (begin + BN > end):
                i_kv = i_head // (n.H // n.HK)
                p_new = (start * n.HK + i_kv) * c.D
                p_old = (row * n.HK + i_kv) * (2 * c.C) * c.D
                if c.PAGES != 0:
                    p_old += gl.load(at[3] + i_batch * c.PAGES[1]).to(gl.int64) * (c.PAGES[0] // 2)
                mbarrier.wait(bars.v_full.index(slot), phase)
                fill_rows(
                    held.key.index(slot), p_key + p_new, p_ring_key + p_old, begin, length, end, n.HK * c.D, BN, c.D, c.C, c.D
                )  # fmt: skip
                fill_rows(
                    held.value.index(slot), p_value + p_new, p_ring_value + p_old, begin, length, end, n.HK * c.D, BN, c.D, c.C, c.D
                )  # fmt: skip
                fence_async_shared()
            b_dot = warpgroup_mma(
                query,
                held.key.index(slot).permute((1, 0)),
                gl.zeros([BM, BN], gl.float32, layout=dots),
                use_acc=False,
                is_async=True,
            )
            b_dot = warpgroup_mma_wait(0, deps=[b_dot])
            mbarrier.arrive(bars.k_empty.index(slot), count=1)
            o_key = begin + o_column
            m_seen = (o_column[None, :] <= o_row[:, None] + c.C) & ((o_key >= 0) & (o_key < end))[None, :]
            b_dot = gl.where(m_seen, b_dot, float("-inf"))
            b_max = gl.max(b_dot, 1)
            ahead = (phantom != 0) & (chunk == 0)  # C logits of 0 with zero values
            b_max = gl.where(ahead, gl.maximum(b_max, 0.0), b_max)
            b_weight = gl.exp2(b_dot * scale2 - (b_max * scale2)[:, None])
            b_sum = gl.sum(b_weight, 1)
            b_sum = gl.where(ahead, b_sum + c.C * gl.exp2(-b_max * scale2), b_sum)
            b_p = gl.convert_layout(b_weight.to(held.value.dtype), gl.DotOperandLayout(0, sums, 2))
            b_acc = gl.zeros([BM, c.D], gl.float32, layout=sums)
            if GROUP == 0:
                _pass_over(entry + 1, bars, c.SLOTS)
            tma.store_wait(pendings=0)
            mbarrier.arrive(bars.end_empty.index(GROUP), count=1, pred=number > 0)

            # Salient cache. One loop: weights carried from one to another would be taken apart and packed again each time.
            before = own
            entry += 2
            for block in range(blocks):
                b_acc, b_max, b_sum, b_p = _absorb(
                    entry, before, b_acc, b_max, b_sum, b_p, query, held, bars, seen - block * BN, scale2, GROUP, c.SLOTS, dots, sums
                )  # fmt: skip
                if block * BN + BN > known:
                    mbarrier.wait(bars.v_full.index(entry % c.SLOTS), (entry // c.SLOTS) & 1)
                    _clear(held.value.index(entry % c.SLOTS), known - block * BN, c.D)
                    fence_async_shared()
                before = entry
                entry += 1
            mbarrier.arrive(bars.q_empty.index(GROUP), count=1)
            slot = before % c.SLOTS
            mbarrier.wait(bars.v_full.index(slot), (before // c.SLOTS) & 1)
            b_next = warpgroup_mma(b_p, held.value.index(slot), b_acc, is_async=True)
            b_acc, b_p = warpgroup_mma_wait(0, deps=[b_next, b_p])
            mbarrier.arrive(bars.v_empty.index(slot), count=1)

            # Linear part: everything older that is not salient.
            b_total = gl.convert_layout(b_sum, gl.SliceLayout(1, sums))
            if c.FACTOR:
                factor = gl.load(p_window_factor + i_head).to(gl.float32)
                b_acc = b_acc * factor
                b_total = b_total * factor
            mbarrier.wait(bars.end_full.index(GROUP), number & 1)
            b_linear = linear.load(sums).to(gl.float32)
            if c.GATE:
                b_linear *= out.load(sums).to(gl.float32)
            b_acc += gl.where(chunk >= 2, b_linear, 0.0)
            b_share = 1.0 / (b_total + b_linear_sum + epsilon)
            # Beyond the capacity: the caller should have refused.
            b_share = gl.where(slots > n.N, float("nan"), b_share)
            b_out = b_acc * b_share[:, None]
            if (first >= length) & (first + BM <= stop):
                out.store(b_out.to(held.out.dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(d_output, [(start + first - length).to(gl.int32), i_head * c.D], out)
            else:
                _store_rows(p_output, b_out, o_query, m_query, start, length, limit, i_head, n.H, c.D, sums)
            number += 1
        else:
            b_nothing = gl.zeros([BM, c.D], gl.float32, layout=sums)
            _store_rows(p_output, b_nothing, o_query, m_query, start, length, limit, i_head, n.H, c.D, sums)
    tma.store_wait(pendings=0)


@gluon.jit(
    do_not_specialize=["B", "T", "H", "HK", "HS", "K", "N", "first_tile", "n_tiles", "phantom"],
    do_not_specialize_on_alignment=ROWS,
)
def attend_tma_kernel(
    d_query, d_key, d_value, d_cached_key, d_cached_value, d_linear, d_gate, d_output, p_key, p_value, p_window_factor,
    p_ring_key, p_ring_value, p_new_tokens, p_past_length, p_query_start, p_state_row, p_linear_sum, p_output,
    B, T, H, HK, HS, K, N, first_tile, n_tiles, phantom, scale, epsilon,
    C: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, GATE: gl.constexpr, FACTOR: gl.constexpr, RAGGED: gl.constexpr,
    PAGES: gl.constexpr, CODES: gl.constexpr,
):  # fmt: skip
    """Output of the queries of chunks c0 + first_tile .. + n_tiles - 1, B rows, H heads. Any number of programs shares the tiles.

    Descriptors (d_) are of rows of D columns: query, gate, output [tokens, H * D]; key, value [tokens, HK * D]; cached_key and
    cached_value [rows * HS * N, D], never used where N is 0, or all pages; linear [B * n_tiles * H * C, D].
    """
    gl.static_assert(C == BM, "a consumer takes one chunk, and its window one block")
    q_buffer = gl.allocate_shared_memory(d_query.dtype, [2, BM, D], d_query.layout)
    k_buffer = gl.allocate_shared_memory(d_key.dtype, [SLOTS, BN, D], d_key.layout)
    v_buffer = gl.allocate_shared_memory(d_value.dtype, [SLOTS, BN, D], d_value.layout)
    linear_buffer = gl.allocate_shared_memory(d_linear.dtype, [2, BM, D], d_linear.layout)
    out_buffer = gl.allocate_shared_memory(d_output.dtype, [2, BM, D], d_output.layout)  # takes the gate first
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    end_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    end_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(end_full.index(i), count=1)
        mbarrier.init(end_empty.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    total = (n_tiles * C + 2 * BM - 1) // (2 * BM) * H * B
    scale2 = scale * LOG2E
    held = Buffers(q_buffer, k_buffer, v_buffer, linear_buffer, out_buffer)
    bars = Barriers(q_full, q_empty, k_full, k_empty, v_full, v_empty, end_full, end_empty)
    n = Sizes(T, H, HK, HS, K, N, first_tile, n_tiles, total)
    c: gl.constexpr = Constants(C, D, SLOTS, GATE, FACTOR, RAGGED, PAGES, CODES)
    gl.warp_specialize(  # what may be None stands in no tuple that has a name
        [
            (_consume, (gl.constexpr(0), d_output, held, bars, p_key, p_value, p_window_factor, p_ring_key, p_ring_value,
                        (p_new_tokens, p_past_length, p_query_start, p_state_row), p_linear_sum, p_output, n, phantom, scale2, epsilon, c)),
            (_consume, (gl.constexpr(1), d_output, held, bars, p_key, p_value, p_window_factor, p_ring_key, p_ring_value,
                        (p_new_tokens, p_past_length, p_query_start, p_state_row), p_linear_sum, p_output, n, phantom, scale2, epsilon, c)),
            (_produce, (d_query, d_key, d_value, d_cached_key, d_cached_value, d_linear, d_gate, held, bars,
                        (p_new_tokens, p_past_length, p_query_start, p_state_row), n, c)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
