"""Dequantizes rows of an 8-bit state, once for a call, for TMA kernels that do not read codes."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import ROWS, as_numbers, row_of


@triton.jit
def _unpack(p_codes, p_scale, p_numbers, first, to, count, D: tl.constexpr, DP: tl.constexpr, RB: tl.constexpr):
    """Rows first .. of the codes, RB at most and `count` at most, to rows `to` .. of the numbers."""
    o_row, o_dim = tl.arange(0, RB), tl.arange(0, DP)
    m_row = o_row < count
    mask = m_row[:, None] & (o_dim < D)[None, :]
    o_place = o_row[:, None] * D + o_dim[None, :]
    b_codes = tl.load(p_codes + first * D + o_place, mask=mask, other=0)
    b_numbers = as_numbers(b_codes, p_scale + first, o_row, m_row, p_numbers.dtype.element_ty, True)
    tl.store(p_numbers + to * D + o_place, b_numbers, mask=mask)


@triton.jit(do_not_specialize=["T", "HK", "HS", "K", "N"], do_not_specialize_on_alignment=ROWS)
def unpack_kernel(
    p_window_key, p_window_value, p_salient_key, p_salient_value, p_window_key_scale, p_window_value_scale, p_salient_key_scale,
    p_salient_value_scale, p_new_tokens, p_past_length, p_query_start, p_state_row, p_ring_key, p_ring_value, p_cached_key,
    p_cached_value,
    T, HK, HS, K, N,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, RB: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """The rings [B, HK, 2C, D] of the call's rows, and of their caches [B, HS, N, D] the slots that the call's queries may see.

    Grid (ceil(N / RB) + 2C / RB, HS, B), HS at least HK.
    """
    RINGS: tl.constexpr = 2 * C // RB
    i_block = tl.program_id(0)
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    row, _start, length, count = row_of(i_batch, p_new_tokens, p_past_length, p_query_start, p_state_row, T, RAGGED)
    if count == 0:
        return
    blocks = tl.num_programs(0) - RINGS
    if i_block < blocks:
        known = tl.minimum(tl.maximum((length + count - 1) // C - 1, 0) * K, N)
        left = known - i_block * RB
        if left > 0:
            first = (row * HS + i_head) * N + i_block * RB
            to = (i_batch.to(tl.int64) * HS + i_head) * N + i_block * RB
            _unpack(p_salient_key, p_salient_key_scale, p_cached_key, first, to, left, D, DP, RB)
            _unpack(p_salient_value, p_salient_value_scale, p_cached_value, first, to, left, D, DP, RB)
    elif i_head < HK:
        first = (row * HK + i_head) * (2 * C) + (i_block - blocks) * RB
        to = (i_batch.to(tl.int64) * HK + i_head) * (2 * C) + (i_block - blocks) * RB
        _unpack(p_window_key, p_window_key_scale, p_ring_key, first, to, RB, D, DP, RB)
        _unpack(p_window_value, p_window_value_scale, p_ring_value, first, to, RB, D, DP, RB)
