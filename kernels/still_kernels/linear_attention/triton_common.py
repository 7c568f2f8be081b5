"""Device functions of several kernels of linear attention."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-110.0)
"""exp of it is 0 in float32: what a decay below means, without infinities whose differences are NaN."""
EXACT = tl.constexpr("tf32x3")


@triton.jit
def load_rows(p_rows, o_token, m_token, stride, o_dim, D: tl.constexpr):
    """Rows [tokens, DP] that lie `stride` elements apart; 0 where there is no token."""
    mask = m_token[:, None] & (o_dim < D)[None, :]
    return tl.load(p_rows + o_token.to(tl.int64)[:, None] * stride + o_dim[None, :], mask=mask, other=0.0)


@triton.jit
def log_decay_of_heads(p_decay, o_token, m_token, stride):
    """Logarithms of one head's decay [tokens], 0 where there is no token."""
    return tl.maximum(tl.load(p_decay + o_token.to(tl.int64) * stride, mask=m_token, other=0.0), LEAST)


@triton.jit
def log_decay_of_keys(p_decay, o_token, m_token, stride, o_dim, D: tl.constexpr):
    """Logarithms of the decay of each key channel [tokens, DP], 0 where there is no token."""
    return tl.maximum(load_rows(p_decay, o_token, m_token, stride, o_dim, D), LEAST)
