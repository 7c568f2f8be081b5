"""Addresses of states in an engine's pages. Without pages the functions add no code to the kernels.

PAGES is 0, or `pages.Pages.kernel`: (bytes of a page, columns of the table, columns before the salient rows, heads of S in a page,
salient rows in a page, bytes from the start of a page of S to its rest or 0). p_state_row is then the table [B, columns] of the call's
rows: the page of all states except S and the salient cache, the pages of S, then alternating pages of salient keys and values.
Scales of 8-bit rows are in the same pages, as rows of one number, D = 1.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_page(p_state, p_state_row, i_batch, column, PAGES: tl.constexpr):
    """A state's pointer, moved to the page in a column of the row's table."""
    if PAGES != 0:
        SIZE: tl.constexpr = p_state.dtype.element_ty.primitive_bitwidth // 8
        page = tl.load(p_state_row + i_batch * PAGES[1] + column).to(tl.int64)
        p_state += tl.multiple_of(page * (PAGES[0] // SIZE), 16)
    return p_state


@triton.jit
def head_in_page(p_state, p_state_row, i_batch, i_head, PAGES: tl.constexpr):
    """(pointer of S, moved to the page of a query head; the head's number there)."""
    if PAGES != 0:
        p_state = in_page(p_state, p_state_row, i_batch, 1 + i_head // PAGES[3], PAGES)
        i_head = i_head % PAGES[3]
    return p_state, i_head


@triton.jit
def cache_of(p_salient, row, i_select, HS, N, D: tl.constexpr, PAGES: tl.constexpr):
    """Where the cache of a select head begins; in pages, where its rows begin in each."""
    if PAGES != 0:
        p_salient += i_select * (PAGES[4] * D)
    else:
        p_salient += (row * HS + i_select) * N * D
    return p_salient


@triton.jit
def slots_of(p_cached, p_state_row, i_batch, slot, VALUE: tl.constexpr, D: tl.constexpr, PAGES: tl.constexpr):
    """Elements from what `cache_of` found, of keys or of values, to a slot; a multiple of 128 and what follows it lie side by side."""
    if PAGES != 0:
        PER_PAGE: tl.constexpr = PAGES[0] * 8 // (p_cached.dtype.element_ty.primitive_bitwidth * D)
        column = PAGES[2] + 2 * (slot // PAGES[4]) + VALUE
        page = tl.load(p_state_row + i_batch * PAGES[1] + column).to(tl.int64)
        found = (page * PER_PAGE + slot % PAGES[4]) * D
    else:
        found = slot * D
    return found


@triton.jit
def scales_of(p_scale, row, i_select, HS, N, CODES: tl.constexpr, PAGES: tl.constexpr):
    """Where the scales of a select head's cache begin, as of `cache_of`; rows that are numbers have none."""
    if CODES:
        found = cache_of(p_scale, row, i_select, HS, N, 1, PAGES)
    else:
        found = 0  # as in `scales_at`
    return found


@triton.jit
def scale_slots_of(p_scale, p_state_row, i_batch, slot, VALUE: tl.constexpr, CODES: tl.constexpr, PAGES: tl.constexpr):
    """Elements from what `scales_of` found to the scale of a slot, as of `slots_of`."""
    if CODES:
        found = slots_of(p_scale, p_state_row, i_batch, slot, VALUE, 1, PAGES)
    else:
        found = 0
    return found


@triton.jit
def rows_of(
    p_salient, p_state_row, i_batch, base, i_select, first, o_slot, mask, VALUE: tl.constexpr, D: tl.constexpr, PAGES: tl.constexpr
):  # fmt: skip
    """Rows of D elements from a salient state's pointer to slots first + o_slot of a select head, any that `mask` has; without pages the
    head's cache begins with row `base`."""
    if PAGES != 0:
        PER_PAGE: tl.constexpr = PAGES[0] * 8 // (p_salient.dtype.element_ty.primitive_bitwidth * D)
        b_slot = first + o_slot
        p_page = p_state_row + i_batch * PAGES[1] + PAGES[2] + 2 * (b_slot // PAGES[4]) + VALUE
        b_page = tl.load(p_page, mask=mask, other=0).to(tl.int64)
        found = b_page * PER_PAGE + (i_select * PAGES[4] + b_slot % PAGES[4])
    else:
        found = base + first + o_slot
    return found
