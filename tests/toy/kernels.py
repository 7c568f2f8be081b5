"""The kernel of still::Decay: a program takes some channels of one head through the row's tokens."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "H", "D"])
def decay_kernel(p_value, p_new_tokens, p_total, p_output, T, H, D, decay, BLOCK: tl.constexpr):
    """value, output [B, T, H, D]; total [B, H, D], in place."""
    o_dim = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_dim = o_dim < D
    i_head, i_batch = tl.program_id(1), tl.program_id(2)
    count = tl.load(p_new_tokens + i_batch).to(tl.int32)
    place = (i_batch.to(tl.int64) * H + i_head) * D + o_dim
    b_total = tl.load(p_total + place, mask=m_dim, other=0.0)
    for token in range(0, T):
        o_value = ((i_batch.to(tl.int64) * T + token) * H + i_head) * D + o_dim
        b_value = tl.load(p_value + o_value, mask=m_dim & (token < count), other=0.0)
        b_total = tl.where(token < count, decay * b_total + b_value, b_total)
        b_out = tl.where(token < count, b_total, 0.0)
        tl.store(p_output + o_value, b_out.to(p_output.dtype.element_ty), mask=m_dim)
    tl.store(p_total + place, b_total, mask=m_dim)


FUNCTIONS = {"decay": decay_kernel}
