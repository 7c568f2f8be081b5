"""From device to the form of linear attention that computes it there."""

from __future__ import annotations

import torch
from torch import Tensor

from still_kernels.forms import has_kernels
from still_kernels.linear_attention.chunked import chunked_linear_attention
from still_kernels.linear_attention.inputs import Inputs, empty_state
from still_kernels.linear_attention.whole import whole_linear_attention
from still_kernels.recompute import fused, recompute


def linear_attention(inputs: Inputs, state: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """Linear attention by the fastest form that covers the call; results and errors as of `chunked_linear_attention`.

    On CUDA the Triton kernels, without reading anything back to the host. Where gradients are asked for, and on the CPU, the PyTorch
    form.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
    """
    if not has_kernels(inputs.query.device) or inputs.wants_gradients():
        return chunked_linear_attention(inputs, state, in_place)
    from still_kernels.linear_attention.launch import triton_linear_attention

    return triton_linear_attention(inputs, state, in_place)


def linear_attention_whole(inputs: Inputs) -> Tensor:
    """Linear attention of sequences that are new and equally long, without their state: what training calls.

    Returns:
        [B, T, H, G, V]. Gradients on CUDA come from recomputation, so that a layer keeps no more than its inputs.

    Raises:
        UnsupportedError: No kernel covers the call on its device.
        ShapeError: A tensor does not fit.
    """
    if not inputs.wants_gradients():
        return _from_empty(inputs)
    if inputs.query.device.type == "cpu":
        return whole_linear_attention(inputs)
    tensors = (inputs.query, inputs.key, inputs.value, inputs.decay, inputs.beta)
    return _RecomputeWhole.apply((inputs.update_rule, inputs.scale), *tensors)


class _RecomputeWhole(torch.autograd.Function):
    """The Triton kernels forward; the backward pass repeats the call in PyTorch, compiled, and differentiates that."""

    @staticmethod
    def forward(ctx, rule, *tensors):  # type: ignore[no-untyped-def]
        ctx.rule = rule
        ctx.save_for_backward(*tensors)
        return _from_empty(Inputs(*tensors, None, *rule))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        rule, scale = ctx.rule

        def call(query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None, beta: Tensor | None) -> Tensor:
            inputs = Inputs(query, key, value, decay, beta, None, rule, scale)
            return fused(whole_linear_attention, grad.device)(inputs)

        return None, *recompute(call, ctx.saved_tensors, ctx.needs_input_grad[1:], grad)


def _from_empty(inputs: Inputs) -> Tensor:
    query, (heads, size) = inputs.query, inputs.value.shape[2:]
    state = empty_state(len(query), heads, query.shape[-1], size, query.dtype, query.device)
    return linear_attention(inputs, state, in_place=True)[0]
