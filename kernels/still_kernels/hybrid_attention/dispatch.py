"""From op, device and dtype to the kernel that computes it, or the reason why there is none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from still_graphs.errors import ShapeError, UnsupportedError
from still_kernels.hybrid_attention.chunked import chunked_hybrid_attention
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.naive import check_inputs
from still_kernels.hybrid_attention.state import HybridAttentionState
from still_kernels.hybrid_attention.variants import refusals as layer_refusals
from still_kernels.hybrid_attention.whole import covers_whole, whole_hybrid_attention

Result = tuple[Tensor, HybridAttentionState]


def refusals(config: HybridAttentionConfig, dtype: torch.dtype) -> list[str]:
    """Why the Triton kernels do not cover a layer, one line per property with what is covered; empty if they do."""
    return layer_refusals(config, str(dtype).removeprefix("torch."))


def _demand_kernel(config: HybridAttentionConfig, dtype: torch.dtype, device: torch.device) -> None:
    if device.type != "cuda":
        raise UnsupportedError(f"device {device.type!r} has no kernel; known: cpu (PyTorch, chunked), cuda (Triton).")
    reasons = _refusals(config, dtype)
    if reasons:
        raise UnsupportedError(
            "no Triton kernel of still::HybridAttention covers this layer: "
            + " ".join(reasons)
            + " Run it on the CPU, or call still_kernels.hybrid_attention.chunked directly."
        )


_refusals = functools.lru_cache(refusals)  # asked at every call


def _demand_contiguous(tensors: dict[str, Tensor]) -> None:
    """The kernels take addresses and compute strides from shapes; what they write in place cannot be copied first."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ShapeError(
                f"{name} {list(tensor.shape)} has strides {tensor.stride()}: not contiguous, and the kernels write or read it "
                "in place. Pass a contiguous tensor."
            )


def _triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    feature_q_weight: Tensor,
    feature_k_weight: Tensor,
    config: HybridAttentionConfig,
    state: HybridAttentionState,
    new_tokens: Tensor | None = None,
    window_factor: Tensor | None = None,
    in_place: bool = False,
) -> Result:
    from still_kernels.hybrid_attention.launch import launch_hybrid_attention

    batch, tokens = check_inputs(query, key, value, gate, config)
    state.check(config, batch)
    _demand_kernel(config, query.dtype, query.device)
    if new_tokens is None:
        new_tokens = torch.full((batch,), tokens, dtype=torch.int64, device=query.device)
    tensors = state.tensors()
    tensors["length"] = tensors["length"].contiguous()
    if in_place:
        _demand_contiguous(tensors)
    else:
        tensors |= {n: t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items() if n != "length"}
    state = HybridAttentionState(**tensors)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    present_length = torch.empty_like(state.length) if tokens == 1 else None
    launch_hybrid_attention(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        None if gate is None else gate.contiguous(),
        feature_q_weight.to(query.dtype).contiguous(),
        feature_k_weight.to(query.dtype).contiguous(),
        config,
        state,
        output,
        batch,
        tokens,
        new_tokens.contiguous(),
        window_factor=_window_factor(config, query.device) if window_factor is None else window_factor,
        present_length=present_length,
    )
    if present_length is None:  # decode writes it on its way: a kernel of its own would cost a tenth of a step
        present_length = state.length + new_tokens.to(state.length.dtype)
    return output, replace(state, length=present_length)


@functools.cache
def factor_tensor(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Window factors on a device; kept, because a copy from the host cannot be captured in a CUDA graph."""
    with torch.inference_mode(False):  # kept for calls that differentiate, which take no tensor made for inference
        return torch.tensor(values, dtype=torch.float32, device=device)


def _window_factor(config: HybridAttentionConfig, device: torch.device) -> Tensor | None:
    return None if config.window_factor is None else factor_tensor(config.window_factor, device)


def kernel_for(device: torch.device) -> Callable[..., Result]:
    """The implementation that `hybrid_attention` uses on a device."""
    return chunked_hybrid_attention if device.type == "cpu" else _triton


def _recompute(  # type: ignore[no-untyped-def]
    call: Callable[[list[Tensor | None]], Tensor], tensors, wanted: Sequence[bool], grad: Tensor
) -> Iterator[Tensor | None]:
    """Gradients of the `wanted` ones of `tensors`, by a new run of `call` on all of them; None for the others."""
    leaves = [None if t is None else t.detach().requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)]
    with torch.enable_grad():
        output = call(leaves)
    asked = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = iter(torch.autograd.grad(output, asked, grad, allow_unused=True))
    return (next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves)


class _Recompute(torch.autograd.Function):
    """The kernel's forward; the backward repeats the call in PyTorch, chunk by chunk, and differentiates that."""

    @staticmethod
    def forward(ctx, config, state, new_tokens, *tensors):  # type: ignore[no-untyped-def]
        ctx.config, ctx.state, ctx.new_tokens = config, state, new_tokens
        ctx.save_for_backward(*tensors)
        *inputs, window_factor = tensors
        output, present = kernel_for(tensors[0].device)(*inputs, config, state, new_tokens, window_factor)
        states = tuple(present.tensors().values())
        ctx.mark_non_differentiable(*states)
        return output, *states

    @staticmethod
    def backward(ctx, grad, *_):  # type: ignore[no-untyped-def]
        def call(leaves):  # type: ignore[no-untyped-def]
            *inputs, window_factor = leaves
            return chunked_hybrid_attention(*inputs, ctx.config, ctx.state, ctx.new_tokens, window_factor)[0]

        grads = _recompute(call, ctx.saved_tensors, ctx.needs_input_grad[3:], grad)
        return None, None, None, *grads


def hybrid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    feature_q_weight: Tensor,
    feature_k_weight: Tensor,
    config: HybridAttentionConfig,
    state: HybridAttentionState,
    new_tokens: Tensor | None = None,
    window_factor: Tensor | None = None,
    in_place: bool = False,
) -> Result:
    """Hybrid attention by the fastest kernel that covers the call; arguments as of `chunked_hybrid_attention`.

    On CUDA the Triton kernels, without reading anything back to the host: a row that outgrows the salient cache with
    overflow="error" gets NaN outputs instead of an exception. On the CPU the chunked form. Where an input asks for
    gradients they come, on CUDA, from recomputation in PyTorch; states carry none.

    Args:
        in_place: Write the new state into `state`'s tensors (CUDA; the CPU form always makes new ones); `length` of the
            returned state is new in any case. Not with gradients.

    Raises:
        UnsupportedError: No kernel covers the call on its device; the message lists what is covered.
        ShapeError: A tensor does not fit, or a state that is to be written in place is not contiguous.
    """
    tensors = (query, key, value, gate, feature_q_weight, feature_k_weight)
    differentiate = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (*tensors, window_factor)
    )
    if query.device.type == "cpu":
        output, present = chunked_hybrid_attention(*tensors, config, state, new_tokens, window_factor)
        if differentiate:
            present = HybridAttentionState(**{name: t.detach() for name, t in present.tensors().items()})
        return output, present
    if differentiate:
        output, *states = _Recompute.apply(config, state, new_tokens, *tensors, window_factor)
        return output, HybridAttentionState(**dict(zip(state.tensors(), states, strict=True)))
    return kernel_for(query.device)(*tensors, config, state, new_tokens, window_factor, in_place=in_place)


class _RecomputeWhole(torch.autograd.Function):
    """The Triton kernels forward; the backward pass repeats the call in PyTorch, compiled, and differentiates that."""

    @staticmethod
    def forward(ctx, config, *tensors):  # type: ignore[no-untyped-def]
        ctx.config = config
        ctx.save_for_backward(*tensors)
        *inputs, window_factor = tensors
        return _from_empty(kernel_for(inputs[0].device), inputs, config, window_factor)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        def call(leaves):  # type: ignore[no-untyped-def]
            *inputs, window_factor = leaves
            return _whole_on(grad.device)(*inputs, ctx.config, window_factor)

        return None, *_recompute(call, ctx.saved_tensors, ctx.needs_input_grad[1:], grad)


@functools.cache
def _whole_on(device: torch.device) -> Callable[..., Tensor]:
    """What differentiates whole sequences on a device: on CUDA, elementwise work costs more than the products unless it is fused."""
    if device.type == "cpu":
        return whole_hybrid_attention
    return torch.compile(whole_hybrid_attention, dynamic=False)


def _from_empty(
    kernel: Callable[..., Result], inputs: Sequence[Tensor | None], config: HybridAttentionConfig, factor: Tensor | None
) -> Tensor:
    query = inputs[0]
    assert query is not None
    batch, tokens = query.shape[:2]
    slots = config.slots_for(tokens) if config.overflow == "error" else config.capacity_slots
    state = HybridAttentionState.empty(config, batch, query.dtype, query.device, slots=slots)
    return kernel(*inputs, config, state, None, factor)[0]


def hybrid_attention_whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    feature_q_weight: Tensor,
    feature_k_weight: Tensor,
    config: HybridAttentionConfig,
    window_factor: Tensor | None = None,
) -> Tensor:
    """Hybrid attention of rows that are new and equally long, without their state: what training calls.

    Args: As of `whole_hybrid_attention`.

    Returns:
        [B, T, H, D]. Gradients on CUDA come from recomputation, so that a layer keeps no more than its inputs.

    Raises:
        UnsupportedError: No kernel covers the call on its device.
    """
    inputs = (query, key, value, gate, feature_q_weight, feature_k_weight)
    differentiate = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*inputs, window_factor))
    if not differentiate or not covers_whole(config, query.shape[1]):
        return _from_empty(hybrid_attention, inputs, config, window_factor)
    if query.device.type == "cpu":
        return whole_hybrid_attention(*inputs, config, window_factor)
    if window_factor is None:  # as a tensor: torch.compile would compile again for every layer's numbers
        window_factor = _window_factor(config, query.device)
    return _RecomputeWhole.apply(config, *inputs, window_factor)


def hybrid_attention_ragged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    feature_q_weight: Tensor,
    feature_k_weight: Tensor,
    config: HybridAttentionConfig,
    state: HybridAttentionState,
    query_start: Tensor,
    state_row: Tensor,
    max_tokens: int,
) -> Tensor:
    """Hybrid attention of packed sequences, each with its own row of a larger state, which is updated in place.

    Args:
        query, gate: [tokens, H, D]. key, value: [tokens, HK, D]. All contiguous, on CUDA.
        query_start: First token of each sequence, then the number of tokens, int32 or int64 [B + 1].
        state_row: Row of `state` that each sequence owns, distinct, int32 or int64 [B].
        max_tokens: An upper bound of the tokens of one sequence; 1 takes the decode kernel.

    Returns:
        [tokens, H, D]. The rows' tensors in `state`, `length` included, are those after the call.

    Raises:
        UnsupportedError: As of `hybrid_attention`. ShapeError: A tensor does not fit or is not contiguous.
    """
    from still_kernels.hybrid_attention.launch import launch_hybrid_attention

    check_inputs(query[None], key[None], value[None], None if gate is None else gate[None], config)
    state.check(config, state.length.shape[0])
    _demand_kernel(config, query.dtype, query.device)
    given = {"query": query, "key": key, "value": value, "gate": gate, **state.tensors()}
    _demand_contiguous({name: t for name, t in given.items() if t is not None})
    output = torch.empty_like(query)
    launch_hybrid_attention(
        query,
        key,
        value,
        gate,
        feature_q_weight.to(query.dtype).contiguous(),
        feature_k_weight.to(query.dtype).contiguous(),
        config,
        state,
        output,
        state_row.shape[0],
        max_tokens,
        None,
        query_start.contiguous(),
        state_row.contiguous(),
        _window_factor(config, query.device),
    )
    state.length.index_add_(0, state_row, query_start.diff().to(state.length.dtype))
    return output
