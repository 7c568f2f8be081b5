"""Calls of still::LinearAttention: choice of implementation, and launch of the Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from still_kernels import launcher
from still_kernels.forms import has_kernels
from still_kernels.linear_attention.chunked import chunked_linear_attention, whole_linear_attention
from still_kernels.linear_attention.meaning import Inputs, empty_state
from still_kernels.linear_attention.pages import Pages
from still_kernels.linear_attention.plan import KERNELS
from still_kernels.linear_attention.spec import LINEAR_ATTENTION
from still_kernels.packing import Packing, size_of_call
from still_kernels.recompute import fused, recompute
from still_kernels.sizes import tensors_of
from still_kernels.tile import TileTable
from still_kernels.torch_ops import traced_op

_prepared = launcher.cached_launches(KERNELS)


def launch_linear_attention(
    inputs: Inputs,
    state: Tensor,
    output: Tensor,
    packing: Packing | None = None,
    table: TileTable | None = None,
    past_length: Tensor | None = None,
) -> None:
    """Run the kernels on `state` [B or rows, H, D, V], in place.

    Args:
        inputs: Contiguous; `new_tokens` are required without a packing. Packed tokens are [tokens, ...].
        output: [B, T, H, G, V] or [tokens, H, G, V], dtype of query.
        state: If the packing has pages, their `view`.
        past_length: With pages: earlier tokens of each of the call's sequences, [B].
    """
    query = inputs.query
    batch, tokens, packed = size_of_call(query, packing, state.shape[0])
    sizes = {"B": batch, "T": tokens, "HQ": query.shape[-3], "G": query.shape[-2], "D": query.shape[-1]}
    sizes |= {"HK": inputs.key.shape[-2], "H": inputs.value.shape[-2], "V": inputs.value.shape[-1]}
    sizes |= {} if inputs.decay is None else {"E": inputs.decay.shape[-1]}
    sizes |= {} if inputs.beta is None else {"W": inputs.beta.shape[-1]}
    present = tuple(name for name in ("decay", "beta") if getattr(inputs, name) is not None)
    attributes = (("update_rule", inputs.update_rule), ("scale", inputs.scale))
    own: tuple[tuple[str, int], ...] = ()
    if packing is not None and packing.pages is not None:
        assert isinstance(packing.pages, Pages) and past_length is not None
        own = (("RAGGED", 1), ("PAGE", packing.pages.size_bytes // 4))  # `triton_common.state_of_head`
    prepared = _prepared(query.device, table, query.dtype, tuple(sizes.items()), attributes, present, packed, own)
    tensors = {
        **tensors_of(inputs),
        "recurrent_state": state,
        "output": output,
        "past_length": past_length,
        **({} if packing is None else packing.tensors()),
    }
    launcher.Launcher().run(prepared, tensors, query)


def _fastest(inputs: Inputs, state: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """Linear attention by the fastest implementation that covers the call; results and errors: see `chunked_linear_attention`.

    The Triton kernels run on CUDA and read nothing back to the host. PyTorch runs on CPUs and if gradients are required. A traced program
    has one node.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
    """
    if not has_kernels(inputs.query.device) or inputs.needs_gradients():
        return chunked_linear_attention(inputs, state, in_place)
    sizes = inputs.check(state)
    query = inputs.query
    launcher.check_device(query)
    present = launcher.written(state, in_place)
    new_tokens = inputs.new_tokens
    if new_tokens is None:
        new_tokens = torch.full((sizes.B,), sizes.T, dtype=torch.int64, device=query.device)
    by_name = {name: x.contiguous() for name, x in tensors_of(inputs).items()}
    by_name |= {name: x.float() for name, x in by_name.items() if name in ("decay", "beta")}
    output = torch.empty(sizes.B, sizes.T, sizes.H, sizes.G, sizes.V, dtype=query.dtype, device=query.device)
    whole = {**by_name, "new_tokens": new_tokens.contiguous()}
    launch_linear_attention(
        Inputs(**whole, update_rule=inputs.update_rule, scale=inputs.scale),  # type: ignore[arg-type]
        present,
        output,
    )
    return output, present


linear_attention = traced_op(LINEAR_ATTENTION, Inputs)(_fastest)


def linear_attention_whole(inputs: Inputs) -> Tensor:
    """Linear attention of new sequences with equal lengths, without their final state, for training.

    Returns:
        [B, T, H, G, V]. Gradients on CUDA come from recomputation, so a layer saves only its inputs.

    Raises:
        UnsupportedError: No kernel covers the call on its device.
        ShapeError: A tensor does not fit.
    """
    if not inputs.needs_gradients():
        return _from_empty(inputs)
    if inputs.query.device.type == "cpu":
        return whole_linear_attention(inputs)
    tensors = (inputs.query, inputs.key, inputs.value, inputs.decay, inputs.beta)
    return _RecomputeWhole.apply((inputs.update_rule, inputs.scale), *tensors)


class _RecomputeWhole(torch.autograd.Function):
    """The forward pass runs the Triton kernels; the backward pass repeats the call in compiled PyTorch and differentiates it."""

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
    return _fastest(inputs, state, in_place=True)[0]
