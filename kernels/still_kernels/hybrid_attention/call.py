"""Choice of the implementation of a call, by op, device and dtype, or the reason why there is none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from still_graphs.errors import ShapeError, UnsupportedError
from still_kernels.alike import demand_alike
from still_kernels.forms import has_kernels
from still_kernels.hybrid_attention.backward.gradients import covers_backward, whole_gradients
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.chunked import chunked_hybrid_attention
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.hybrid_attention.meaning.whole import covers_whole, whole_hybrid_attention
from still_kernels.hybrid_attention.plan import KERNELS
from still_kernels.launcher import Bound
from still_kernels.plan import Call
from still_kernels.recompute import fused, recompute

Result = tuple[Tensor, HybridAttentionState]


def refusals(config: HybridAttentionConfig, dtype: torch.dtype) -> list[str]:
    """Reasons why the Triton kernels do not cover a layer, one line per property with the covered values; empty if they do."""
    return KERNELS.refusals(Call(config.symbols(), config.attributes(), dtype=str(dtype).removeprefix("torch.")))


def demand_kernel(config: HybridAttentionConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UnsupportedError, with the covered values, if no Triton kernel covers a layer on a device."""
    if device.type != "cuda":
        raise UnsupportedError(f"device {device.type!r} has no kernel; known: cpu (PyTorch, chunked), cuda (Triton).")
    reasons = _refusals(config, dtype)
    if reasons:
        raise UnsupportedError(
            "no Triton kernel of still::HybridAttention covers this layer: "
            + " ".join(reasons)
            + " Run it on the CPU, or call still_kernels.hybrid_attention.meaning.chunked directly."
        )


_refusals = functools.lru_cache(refusals)  # called for every call of the op


def demand_contiguous(tensors: dict[str, Tensor]) -> None:
    """Raise ShapeError for a tensor that is not contiguous. Kernels compute strides from shapes, and tensors written in place cannot be
    copied first."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ShapeError(
                f"{name} {list(tensor.shape)} has strides {tensor.stride()}: not contiguous, and the kernels write or read it "
                "in place. Pass a contiguous tensor."
            )


def _triton(
    inputs: Inputs, config: HybridAttentionConfig, state: HybridAttentionState, in_place: bool = False
) -> Result:
    from still_kernels.hybrid_attention.launch import launch_hybrid_attention

    batch, tokens = inputs.check(config)
    state.check(config, batch)
    demand_kernel(config, inputs.query.dtype, inputs.query.device)
    demand_alike(inputs.query, state.window_key)
    new_tokens = inputs.counts().contiguous()
    tensors = state.tensors()
    tensors["length"] = tensors["length"].contiguous()
    if in_place:
        demand_contiguous(tensors)
    else:
        tensors |= {n: t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items() if n != "length"}
    state = HybridAttentionState(**tensors)
    output = torch.empty_like(inputs.query, memory_format=torch.contiguous_format)
    present_length = torch.empty_like(state.length) if tokens == 1 else None
    copied = replace(as_read(inputs), new_tokens=new_tokens)
    launch_hybrid_attention(copied, config, state, output, present_length=present_length)
    if present_length is None:  # decode writes it on its way: a kernel of its own would cost a tenth of a step
        present_length = state.length + new_tokens.to(state.length.dtype)
    return output, replace(state, length=present_length)


def as_read(inputs: Inputs) -> Inputs:
    """`inputs` as kernels need them: contiguous where they compute strides from shapes, and feature maps in the type of the tokens."""
    names = ("query", "key", "value", "gate", "feature_q_weight", "feature_k_weight")
    found: dict[str, Any] = {name: x.contiguous() for name in names if (x := getattr(inputs, name)) is not None}
    maps = {name: found[name].to(inputs.query.dtype) for name in ("feature_q_weight", "feature_k_weight")}
    return replace(inputs, **{**found, **maps})


def kernel_for(device: torch.device) -> Callable[..., Result]:
    """The implementation of `hybrid_attention` on a device."""
    return chunked_hybrid_attention if device.type == "cpu" else _triton


class _Recompute(torch.autograd.Function):
    """The forward pass runs the kernel; the backward pass repeats the call in PyTorch, chunk by chunk, and differentiates it."""

    @staticmethod
    def forward(ctx, config, state, *tensors):  # type: ignore[no-untyped-def]
        ctx.config, ctx.state = config, state
        ctx.save_for_backward(*tensors)
        inputs = Inputs(*tensors)
        output, present = kernel_for(inputs.query.device)(inputs, config, state)
        states = tuple(present.tensors().values())
        ctx.mark_non_differentiable(*states)
        return output, *states

    @staticmethod
    def backward(ctx, grad, *_):  # type: ignore[no-untyped-def]
        def call(*tensors: Tensor) -> Tensor:
            return chunked_hybrid_attention(Inputs(*tensors), ctx.config, ctx.state)[0]

        return None, None, *recompute(call, ctx.saved_tensors, ctx.needs_input_grad[2:], grad)


def hybrid_attention(
    inputs: Inputs, config: HybridAttentionConfig, state: HybridAttentionState, in_place: bool = False
) -> Result:
    """Hybrid attention by the fastest kernel that covers the call; results: see `chunked_hybrid_attention`.

    The Triton kernels run on CUDA and read nothing back to the host: a row that outgrows the salient cache with overflow="error" gets NaN
    outputs instead of an exception. CPUs use the chunked form. Gradients on CUDA come from recomputation in PyTorch; states have none.

    Args:
        in_place: Write the new state into `state`'s tensors (CUDA; CPUs always make new ones); `length` of the returned state is always
            new. Not with gradients.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
        ShapeError: A tensor does not fit, or a state to be written in place is not contiguous.
    """
    differentiate = inputs.needs_gradients()
    if not has_kernels(inputs.query.device):
        output, present = chunked_hybrid_attention(inputs, config, state)
        if differentiate:
            present = HybridAttentionState(**{name: t.detach() for name, t in present.tensors().items()})
        return output, present
    if differentiate:
        output, *states = _Recompute.apply(config, state, *inputs.tensors())
        return output, HybridAttentionState(**dict(zip(state.tensors(), states, strict=True)))
    return kernel_for(inputs.query.device)(inputs, config, state, in_place=in_place)


def bind_decode(inputs: Inputs, config: HybridAttentionConfig, state: HybridAttentionState) -> Bound | None:
    """Prepared launches for decode steps like this one, which write into `state`; None if kernels would need copies of its tensors.

    Each call passes output, query, key, value, gate if the layer has one, the feature weights, new_tokens and past_length, with these
    shapes and types.

    Raises:
        UnsupportedError: No kernel covers the layer. ShapeError: A tensor does not fit.
    """
    query, states = inputs.query, [x for name, x in state.tensors().items() if name != "length"]
    weights = (inputs.feature_q_weight, inputs.feature_k_weight)
    alike = all(x.dtype == query.dtype for x in weights)
    if not query.is_cuda or query.shape[1] != 1 or not alike or not all(x.is_contiguous() for x in states):
        return None
    from still_kernels.hybrid_attention import launch

    batch, _ = inputs.check(config)
    state.check(config, batch)
    demand_kernel(config, query.dtype, query.device)
    demand_alike(query, state.window_key)
    return launch.bind_decode(inputs, config, state, inputs.factor(config))


class _KernelsWhole(torch.autograd.Function):
    """Triton kernels for both passes. A call saves its inputs, its output and its selection."""

    @staticmethod
    def forward(ctx, config, *tensors):  # type: ignore[no-untyped-def]
        ctx.config = config
        output, folds = _whole_with_selection(Inputs(*tensors), config)
        ctx.save_for_backward(output, folds, *tensors)
        return output

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        output, folds, *tensors = ctx.saved_tensors
        inputs = as_read(Inputs(*tensors))
        wanted = {name for name, needed in zip(vars(inputs), ctx.needs_input_grad[1:], strict=True) if needed}
        found = whole_gradients(inputs, ctx.config, output, folds, grad.contiguous(), wanted)
        return None, *(
            found[name].to(tensor.dtype) if name in wanted else None
            for name, tensor in zip(vars(inputs), tensors, strict=True)
        )


def _whole_with_selection(inputs: Inputs, config: HybridAttentionConfig) -> tuple[Tensor, Tensor]:
    """Output of the kernels, and the selection in the form of `whole_gradients`."""
    from still_kernels.hybrid_attention.launch import launch_hybrid_attention

    batch, tokens = inputs.check(config, whole=True)
    query = inputs.query
    demand_kernel(config, query.dtype, query.device)
    state = HybridAttentionState.empty(config, batch, query.dtype, query.device, slots=config.slots_for(tokens))
    copied = replace(as_read(inputs), new_tokens=inputs.counts())
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    tiles = (tokens + config.chunk_size - 2) // config.chunk_size + 1
    folds = query.new_empty((batch, tiles + 2, config.select_heads, config.chunk_size), dtype=torch.int8)
    launch_hybrid_attention(copied, config, state, output, flags=folds)
    return output, folds


class _RecomputeWhole(torch.autograd.Function):
    """The forward pass runs the kernels. For layers that `whole_gradients` does not cover, the backward pass repeats the call in compiled
    PyTorch and differentiates it."""

    @staticmethod
    def forward(ctx, config, *tensors):  # type: ignore[no-untyped-def]
        ctx.config = config
        ctx.save_for_backward(*tensors)
        inputs = Inputs(*tensors)
        return _from_empty(kernel_for(inputs.query.device), inputs, config)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        def call(*tensors: Tensor) -> Tensor:
            return fused(whole_hybrid_attention, grad.device)(Inputs(*tensors), ctx.config)

        return None, *recompute(call, ctx.saved_tensors, ctx.needs_input_grad[1:], grad)


def _from_empty(kernel: Callable[..., Result], inputs: Inputs, config: HybridAttentionConfig) -> Tensor:
    batch, tokens = inputs.check(config, whole=True)
    slots = config.slots_for(tokens) if config.overflow == "error" else config.capacity_slots
    state = HybridAttentionState.empty(config, batch, inputs.query.dtype, inputs.query.device, slots=slots)
    return kernel(inputs, config, state)[0]


def hybrid_attention_whole(inputs: Inputs, config: HybridAttentionConfig) -> Tensor:
    """Hybrid attention of new rows with equal lengths, without their final state, for training.

    Returns:
        [B, T, H, D]. Gradients on CUDA come from kernels, so a layer saves its inputs, output and selection. Layers that these kernels do
        not cover recompute in PyTorch.

    Raises:
        UnsupportedError: No kernel covers the call on its device.
        ShapeError: A tensor does not fit.
    """
    if not inputs.needs_gradients() or not covers_whole(config, inputs.query.shape[1]):
        return _from_empty(hybrid_attention, inputs, config)
    if inputs.query.device.type == "cpu":
        return whole_hybrid_attention(inputs, config)
    # The factors as a tensor: with numbers torch.compile would compile again for every layer.
    function = _KernelsWhole if covers_backward(config, inputs.query.dtype) else _RecomputeWhole
    return function.apply(config, *replace(inputs, window_factor=inputs.factor(config)).tensors())
