"""The traced form of STILL's hybrid attention: the torch op `still::hybrid_attention`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from still_export.mixers.torch_ops import Given, call, register
from still_graphs.ops.hybrid_attention import HYBRID_ATTENTION
from still_graphs.ops.spec import AttributeValue
from still_kernels.hybrid_attention import HybridAttentionConfig, HybridAttentionState
from still_kernels.hybrid_attention.dispatch import factor_tensor
from still_kernels.hybrid_attention.dispatch import hybrid_attention as kernel
from still_kernels.hybrid_attention.state import state_names


def _compute(given: Given, attributes: Mapping[str, AttributeValue]) -> dict[str, Tensor]:
    """By the kernel that dispatch chooses for the device; the slots of the cache stand for the capacity."""
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    chunk, salient = int(attributes["chunk_size"]), int(attributes["salient_per_chunk"])
    config = HybridAttentionConfig.from_attributes(
        dict(attributes),
        num_heads=tensors["query"].shape[2],
        num_kv_heads=tensors["key"].shape[2],
        head_dim=tensors["query"].shape[3],
        feature_dim=tensors["feature_q_weight"].shape[1],
        gated="gate" in tensors,
        capacity_tokens=(tensors["past_salient_key"].shape[2] // max(salient, 1) + 2) * chunk,
    )
    states = {name: tensors[f"past_{name}"] for name in state_names(config)}
    output, present = kernel(
        tensors["query"],
        tensors["key"],
        tensors["value"],
        tensors.get("gate"),
        tensors["feature_q_weight"],
        tensors["feature_k_weight"],
        config,
        HybridAttentionState(length=tensors["past_length"], **states),
        tensors["new_tokens"],
        # Factors stay a tensor: to read them would make the host wait for the device, and a CUDA graph impossible.
        tensors.get("window_factor"),
    )
    found = present.tensors()
    return {"output": output, **{f"present_{name}": found[name] for name in states}}


register(HYBRID_ATTENTION, _compute)


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
    given = {
        "query": query,
        "key": key,
        "value": value,
        "gate": gate,
        "feature_q_weight": feature_q_weight,
        "feature_k_weight": feature_k_weight,
        "window_factor": window_factor,
        "new_tokens": new_tokens,
        "past_length": state.length,
        **{f"past_{name}": tensor for name, tensor in state.tensors().items() if name != "length"},
    }
    results = call(HYBRID_ATTENTION, given, config.attributes())
    present = {name.removeprefix("present_"): tensor for name, tensor in results.items() if name != "output"}
    return results["output"], HybridAttentionState(length=state.length + new_tokens, **present)
