"""Loads and stores of S: float32, or in pages bfloat16 with a rest (see `narrow.py`). For float32 each function compiles to a plain load or
store."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import ROUND, floats_of
from still_kernels.hybrid_attention.narrow import MOST, SHIFT

_SHIFT = tl.constexpr(SHIFT)
_MOST = tl.constexpr(MOST)


@triton.jit
def rest_of(p_kv, PAGES: tl.constexpr):
    """Where in its page the rest of S begins, for which p_kv is the page; of float32, which has none, p_kv."""
    p_rest = p_kv
    if p_kv.dtype.element_ty == tl.bfloat16:
        tl.static_assert(PAGES != 0, "a linear state in bfloat16 has its rest in pages")
        p_rest = p_kv.to(tl.pointer_type(tl.int8), bitcast=True) + PAGES[5]
    return p_rest


@triton.jit
def _exponent(b_kept):
    return (b_kept.to(tl.int32, bitcast=True) >> 23) & 0xFF


@triton.jit
def load_sums(p_state, p_rest, mask):
    """A block of S in float32, the rest with it."""
    b_sums = tl.load(p_state, mask=mask, other=0.0)
    if p_state.dtype.element_ty == tl.bfloat16:
        b_rest = floats_of(tl.load(p_rest, mask=mask, other=0))
        b_sums = b_sums.to(tl.float32)
        b_step = (tl.maximum(_exponent(b_sums) - _SHIFT, 0) << 23).to(tl.float32, bitcast=True)
        b_sums += b_rest * b_step
    return b_sums


@triton.jit
def store_sums(p_state, p_rest, b_sums, mask):
    """Write a block of S, and what rounding takes of it."""
    if p_state.dtype.element_ty == tl.bfloat16:
        b_kept = b_sums.to(tl.bfloat16)
        b_wide = b_kept.to(tl.float32)
        b_exponent = _exponent(b_wide)
        # 1 over the step, both powers of two.
        b_steps = tl.where(b_exponent > _SHIFT, (254 + _SHIFT - b_exponent) << 23, 0).to(tl.float32, bitcast=True)
        b_rest = ((b_sums - b_wide) * b_steps + ROUND) - ROUND
        tl.store(p_state, b_kept, mask=mask)
        tl.store(p_rest, tl.minimum(tl.maximum(b_rest, -_MOST), _MOST).to(tl.int8), mask=mask)
    else:
        tl.store(p_state, b_sums, mask=mask)
