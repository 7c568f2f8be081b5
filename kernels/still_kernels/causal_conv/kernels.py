"""The causal convolution: blocks of tokens for prompts; few tokens together with their new state for steps."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import row_of, wait_for_ahead


@triton.jit
def convolve(
    p_input, p_weight, p_bias, p_state, p_output, first, count, span, C, o_channel, K: tl.constexpr, BT: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Output of tokens first .. first + BT - 1 of one row and a block of channels; those from `count` to `span` are padding, 0.

    p_input, p_output: The row's first token. p_state: The row's columns [C, K - 1], oldest first, which stand before that token.
    """
    o_token = first + tl.arange(0, BT)
    m_channel = o_channel < C
    b_sum = tl.zeros([BT, o_channel.shape[0]], tl.float32)
    if p_bias is not None:
        b_sum += tl.load(p_bias + o_channel, mask=m_channel, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(K):
        o_seen = o_token + (tap - K + 1)
        m_seen = (o_token < count)[:, None] & m_channel[None, :]
        p_seen = p_input + o_seen.to(tl.int64)[:, None] * C + o_channel[None, :]
        b_seen = tl.load(p_seen, mask=m_seen & (o_seen >= 0)[:, None], other=0.0).to(tl.float32)
        if first < K - 1:
            p_column = p_state + o_channel[None, :] * (K - 1) + (o_seen + (K - 1))[:, None]
            b_seen += tl.load(p_column, mask=m_seen & (o_seen < 0)[:, None], other=0.0).to(tl.float32)
        b_tap = tl.load(p_weight + o_channel * K + tap, mask=m_channel, other=0.0).to(tl.float32)
        b_sum += b_seen * b_tap[None, :]
    if SILU:
        b_sum = b_sum / (1.0 + tl.exp(-b_sum))
    b_sum = tl.where((o_token < count)[:, None], b_sum, 0.0)
    p_tile = p_output + o_token.to(tl.int64)[:, None] * C + o_channel[None, :]
    tl.store(p_tile, b_sum.to(p_output.dtype.element_ty), mask=(o_token < span)[:, None] & m_channel[None, :])


@triton.jit
def keep_latest(p_input, p_state, count, C, o_channel, K: tl.constexpr, KP: tl.constexpr):
    """The latest K - 1 columns of state and `count` tokens into the state; nothing where there is no token."""
    o_tap = tl.arange(0, KP)
    m_column = (o_channel < C)[:, None] & (o_tap < K - 1)[None, :] & (count > 0)
    o_seen = (count + o_tap - (K - 1))[None, :] + 0 * o_channel[:, None]  # token of the call, before it where negative
    p_new = p_input + o_seen.to(tl.int64) * C + o_channel[:, None]
    b_new = tl.load(p_new, mask=m_column & (o_seen >= 0), other=0.0)
    p_row = p_state + o_channel[:, None] * (K - 1)
    b_old = tl.load(p_row + o_seen + (K - 1), mask=m_column & (o_seen < 0), other=0.0)
    tl.debug_barrier()  # columns move within the row: all are read before one is written
    tl.store(p_row + o_tap[None, :], tl.where(o_seen >= 0, b_new, b_old), mask=m_column)


@triton.jit(do_not_specialize=["T", "C"])
def conv_kernel(
    p_input, p_weight, p_bias, p_conv_state, p_new_tokens, p_output,
    T, C,
    K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, ALIGNED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Output of BT tokens and BC channels; the state is read and left. Grid (ceil(T / BT), ceil(C / BC), B)."""
    if ALIGNED:
        C = C // 8 * 8  # which tells the compiler
    row, start, _length, count = row_of(tl.program_id(2), p_new_tokens, None, None, None, T, False)
    first = tl.program_id(0) * BT
    if first >= T:
        return
    o_channel = tl.program_id(1) * BC + tl.arange(0, BC)
    convolve(
        p_input + start * C, p_weight, p_bias, p_conv_state + row * C * (K - 1), p_output + start * C, first, count, T, C,
        o_channel, K, BT, SILU,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "C"])
def commit_kernel(
    p_input, p_conv_state, p_new_tokens,
    T, C,
    K: tl.constexpr, KP: tl.constexpr, BC: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The state behind a prompt, after everyone has read that before it. Grid (ceil(C / BC), B)."""
    if ALIGNED:
        C = C // 8 * 8  # which tells the compiler
    row, start, _length, count = row_of(tl.program_id(1), p_new_tokens, None, None, None, T, False)
    o_channel = tl.program_id(0) * BC + tl.arange(0, BC)
    keep_latest(p_input + start * C, p_conv_state + row * C * (K - 1), count, C, o_channel, K, KP)


@triton.jit(do_not_specialize=["T", "C"])
def step_kernel(
    p_input, p_weight, p_bias, p_conv_state, p_new_tokens, p_output,
    T, C,
    K: tl.constexpr, KP: tl.constexpr, BC: tl.constexpr, ALIGNED: tl.constexpr, SILU: tl.constexpr,
    SETTLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A few tokens of a row, one after the other, and the state behind them, BC channels. Grid (ceil(C / BC), B)."""
    wait_for_ahead(PDL, SETTLE)
    if ALIGNED:
        C = C // 8 * 8  # which tells the compiler
    row, start, _length, count = row_of(tl.program_id(1), p_new_tokens, None, None, None, T, False)
    o_channel = tl.program_id(0) * BC + tl.arange(0, BC)
    p_input += start * C
    p_conv_state += row * C * (K - 1)
    for t in range(0, T):
        convolve(p_input, p_weight, p_bias, p_conv_state, p_output + start * C, t, count, T, C, o_channel, K, 1, SILU)
    keep_latest(p_input, p_conv_state, count, C, o_channel, K, KP)


FUNCTIONS = {"conv": conv_kernel, "commit": commit_kernel, "step": step_kernel}
