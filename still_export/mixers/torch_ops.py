"""The torch custom ops of the domain "still", their schemas made from the OpSpecs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from still_graphs.ops import OpSpec
from still_graphs.ops.hybrid_attention import HYBRID_ATTENTION
from still_graphs.ops.spec import AttributeValue
from still_kernels.dispatch import factor_tensor
from still_kernels.hybrid_attention import HybridAttentionConfig, HybridAttentionState
from still_kernels.hybrid_attention.state import state_names, state_shape

_TORCH_TYPES = {int: "int", float: "float", str: "str"}


def torch_schema(spec: OpSpec) -> str:
    """Schema string of a torch op: inputs, past states, attributes; outputs, present states.

    A present state that the configuration does not have is returned as an empty tensor.
    """
    optional = {t.name for t in spec.inputs if t.optional} | {f"past_{s.name}" for s in spec.states if s.optional}
    tensors = [f"Tensor{'?' if name in optional else ''} {name}" for name in spec.input_names()]
    attributes = [f"{_TORCH_TYPES[type(a.default)]} {a.name}" for a in spec.attributes]
    returns = ", ".join("Tensor" for _ in spec.output_names())
    return f"{spec.torch_name}({', '.join(tensors + attributes)}) -> ({returns})"


_LIBRARY = torch.library.Library(HYBRID_ATTENTION.domain, "DEF")
_LIBRARY.define(torch_schema(HYBRID_ATTENTION))


def _call(arguments: tuple[Any, ...]) -> tuple[dict[str, Any], HybridAttentionConfig]:
    """Arguments of an op call by name, and the configuration they amount to (slots stand for the capacity)."""
    spec = HYBRID_ATTENTION
    names = spec.input_names()
    tensors = dict(zip(names, arguments[: len(names)], strict=True))
    attributes: dict[str, AttributeValue] = dict(
        zip((a.name for a in spec.attributes), arguments[len(names) :], strict=True)
    )
    query, weight, cache = tensors["query"], tensors["feature_q_weight"], tensors["past_salient_key"]
    chunk, salient = int(attributes["chunk_size"]), int(attributes["salient_per_chunk"])
    capacity = (cache.shape[2] // max(salient, 1) + 2) * chunk
    config = HybridAttentionConfig.from_attributes(
        attributes,
        num_heads=query.shape[2],
        num_kv_heads=tensors["key"].shape[2],
        head_dim=query.shape[3],
        feature_dim=weight.shape[1],
        gated=tensors["gate"] is not None,
        capacity_tokens=capacity,
    )
    return tensors, config


def _eager(*arguments: Any) -> tuple[Tensor, ...]:
    """The op's value: the kernel that dispatch chooses for the device."""
    from still_kernels.dispatch import hybrid_attention as kernel

    tensors, config = _call(arguments)
    states = {name: tensors[f"past_{name}"] for name in state_names(config)}
    state = HybridAttentionState(length=tensors["past_length"], **states)
    query, key, value, gate, q_weight, k_weight = (
        tensors[t.name] for t in HYBRID_ATTENTION.inputs if t.role != "count" and t.name != "window_factor"
    )
    # Factors stay a tensor: to read them would make the host wait for the device, and a CUDA graph impossible.
    counts, factor = tensors["new_tokens"], tensors["window_factor"]
    output, present = kernel(query, key, value, gate, q_weight, k_weight, config, state, counts, factor)
    found = present.tensors()
    missing = output.new_empty(0, dtype=torch.float32)
    results = (output, *(found.get(s.name, missing) for s in HYBRID_ATTENTION.states))
    return tuple(t.contiguous() for t in results)


def _fake(*arguments: Any) -> tuple[Tensor, ...]:
    """Shapes and dtypes of the op's results, all contiguous; a call's slots are those of its salient cache."""
    spec = HYBRID_ATTENTION
    tensors = dict(zip(spec.input_names(), arguments, strict=False))
    query = tensors["query"]
    present = []
    for state in spec.states:
        past = tensors[f"past_{state.name}"]
        present.append(query.new_empty(0, dtype=torch.float32) if past is None else past.new_empty(past.shape))
    return query.new_empty(query.shape), *present


_LIBRARY.impl(HYBRID_ATTENTION.torch_name, _eager, "CompositeExplicitAutograd")
torch.library.register_fake(f"{HYBRID_ATTENTION.domain}::{HYBRID_ATTENTION.torch_name}", _fake)


def hybrid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    feature_q_weight: Tensor,
    feature_k_weight: Tensor,
    config: HybridAttentionConfig,
    state: HybridAttentionState,
    new_tokens: Tensor,
    window_factor: Tensor | None = None,
) -> tuple[Tensor, HybridAttentionState]:
    """Call `torch.ops.still.hybrid_attention`: traceable as one node, differentiable, right on every device.

    Args:
        query, key, value, gate, feature_q_weight, feature_k_weight, new_tokens: As of `chunked_hybrid_attention`.
        config: The layer; its capacity is that of `state`.
        state: What the rows have seen.
        window_factor: float32 [H]; must hold `config.window_factor`, None where that is None.

    Returns:
        output [B, T, H, D] and the state after the call.
    """
    if window_factor is None and config.window_factor is not None:
        if torch.compiler.is_compiling():
            window_factor = torch.tensor(config.window_factor, device=query.device)
        else:
            window_factor = factor_tensor(config.window_factor, query.device)
    results = torch.ops.still.hybrid_attention(
        query,
        key,
        value,
        gate,
        feature_q_weight,
        feature_k_weight,
        window_factor,
        new_tokens,
        state.length,
        *(getattr(state, s.name) for s in HYBRID_ATTENTION.states),
        *config.attributes().values(),
    )
    names = [s.name for s in HYBRID_ATTENTION.states]
    present = {n: t for n, t in zip(names, results[1:], strict=True) if n in state_names(config)}
    return results[0], HybridAttentionState(length=state.length + new_tokens, **present)


__all__ = ["hybrid_attention", "state_shape", "torch_schema"]
