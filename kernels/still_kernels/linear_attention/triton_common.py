"""Device functions shared by kernels of linear attention."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-110.0)
"""exp of it is 0 in float32. Stronger decays are clamped to it, since differences of infinities would be NaN."""
EXACT = tl.constexpr("tf32x3")
FIXED = tl.constexpr(2.0**40)
"""Units of a fixed-point sum of decays; the sum of 64 decays has 53 bits."""


@triton.jit
def state_of_head(
    p_state, p_past_length, i_batch, row, i_head, H, first, mask, D: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """(Pointer of a head's state, `mask` of what the row's earlier tokens left there); `first`: tokens of this call that lie before.

    PAGE: Floats from one row's states to the next where they lie in an engine's pages, which nobody clears: a row that has seen
    nothing then starts empty. 0: H * D * V, and every state is what its row left.
    """
    if PAGE:
        seen = tl.load(p_past_length + i_batch).to(tl.int64) + first
        p_state += row * PAGE + i_head * (D * V)
        mask = mask & (seen > 0)
    else:
        p_state += (row * H + i_head) * (D * V)
    return p_state, mask


@triton.jit
def load_rows(p_rows, begin, count, stride, o_inner, o_dim, D: tl.constexpr):
    """Rows [tokens, DP] from token `begin` on that lie `stride` elements apart; 0 from token `count` on."""
    mask = (o_inner < count - begin)[:, None] & (o_dim < D)[None, :]
    p_rows += begin.to(tl.int64) * stride
    return tl.load(p_rows + (o_inner[:, None] * stride + o_dim[None, :]), mask=mask, other=0.0)


@triton.jit
def log_decay_of_heads(p_decay, begin, count, stride, o_inner):
    """Logarithms of one head's decay [tokens], 0 where there is no token."""
    p_decay += begin.to(tl.int64) * stride
    return tl.maximum(tl.load(p_decay + o_inner * stride, mask=o_inner < count - begin, other=0.0), LEAST)


@triton.jit
def log_decay_of_keys(p_decay, begin, count, stride, o_inner, o_dim, D: tl.constexpr):
    """Logarithms of the decay of each key channel [tokens, DP], 0 where there is no token."""
    return tl.maximum(load_rows(p_decay, begin, count, stride, o_inner, o_dim, D), LEAST)


@triton.jit
def sums_of_decay(b_decay):
    """Sums of a chunk's decays [C] up to each token, as two float32 (the second what the first has no bits for), and behind it."""
    b_fixed = (b_decay * FIXED).to(tl.int64)
    b_sum = tl.cumsum(b_fixed, 0)
    b_high = b_sum.to(tl.float32)
    b_low = (b_sum - b_high.to(tl.int64)).to(tl.float32)
    b_behind = (tl.sum(b_fixed, 0) - b_sum).to(tl.float32)
    return b_high * (1 / FIXED), b_low * (1 / FIXED), b_behind * (1 / FIXED)


@triton.jit
def decay_between(b_high, b_low):
    """[C, C]: what the decays behind token j up to token i leave, for i >= j. Two floats, as a difference of long sums is else inexact."""
    return tl.exp((b_high[:, None] - b_high[None, :]) + (b_low[:, None] - b_low[None, :]))


@triton.jit
def halves(b_x):
    """float32 as a sum of two bfloat16, 16 bits of it: its upper half as it is, and the rest rounded."""
    b_high = (b_x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return b_high.to(tl.bfloat16), (b_x - b_high).to(tl.bfloat16)


@triton.jit
def gemm_of_halves(b_a, b_a_low, b_b, b_b_low):
    """GEMM of what `halves` gives, in float32; the lower halves' own product is beyond its 16 bits."""
    return tl.dot(b_a, b_b, tl.dot(b_a, b_b_low, tl.dot(b_a_low, b_b)))
