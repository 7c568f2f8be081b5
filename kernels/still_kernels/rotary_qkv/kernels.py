"""One launch for all numbers of a token: it rotates, copies or gates each column by its position."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["Q", "K", "V", "G", "D"])
def rotary_kernel(p_input, p_cos, p_sin, p_gate_bias, p_gate_input, p_query, p_key, p_value, p_gate, Q, K, V, G, D,
                  BC: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """p_query [M, Q], p_key [M, K], p_value [M, V] and p_gate [M, G] of p_input [M, Q + K + V + G], whose G are p_gate_input [M, G]
    where that is given. Grid (M, ceil(columns / BC))."""
    if ALIGNED:
        Q, K, V, G, D = Q // 8 * 8, K // 8 * 8, V // 8 * 8, G // 8 * 8, D // 16 * 16  # which tells the compiler
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BC + tl.arange(0, BC)
    own = Q + K + V
    if p_gate_input is None:
        own += G
    p_row = p_input + i_row * own
    b_x = tl.load(p_row + o_column, mask=o_column < own, other=0.0)
    if tl.program_id(1) * BC < Q + K:
        m_turned = o_column < Q + K
        o_head = o_column % D
        half = D // 2
        m_first = o_head < half
        b_far = tl.load(p_row + tl.where(m_first, o_column + half, o_column - half), mask=m_turned, other=0.0).to(
            tl.float32
        )
        b_cos = tl.load(p_cos + i_row * D + o_head, mask=m_turned, other=0.0).to(tl.float32)
        b_sin = tl.load(p_sin + i_row * D + o_head, mask=m_turned, other=0.0).to(tl.float32)
        b_turned = (b_x.to(tl.float32) * b_cos + tl.where(m_first, -b_far, b_far) * b_sin).to(p_query.dtype.element_ty)
        tl.store(p_query + i_row * Q + o_column, b_turned, mask=o_column < Q)
        tl.store(p_key + i_row * K + (o_column - Q), b_turned, mask=(o_column >= Q) & m_turned)
    o_value = o_column - (Q + K)
    tl.store(p_value + i_row * V + o_value, b_x, mask=(o_value >= 0) & (o_value < V))
    if p_gate is not None:
        o_gate = o_value - V
        m_gate = (o_gate >= 0) & (o_gate < G)
        if p_gate_input is not None:
            b_x = tl.load(p_gate_input + i_row * G + o_gate, mask=m_gate, other=0.0)
        b_gate = b_x.to(tl.float32)
        if p_gate_bias is not None:
            b_gate += tl.load(p_gate_bias + o_gate, mask=m_gate, other=0.0).to(tl.float32)
        b_gate = 1 / (1 + tl.exp(-b_gate))
        tl.store(p_gate + i_row * G + o_gate, b_gate.to(p_gate.dtype.element_ty), mask=m_gate)


FUNCTIONS = {"rotary": rotary_kernel}
