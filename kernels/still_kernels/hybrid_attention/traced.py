"""The traced form of STILL's hybrid attention: the torch op `still::hybrid_attention`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from still_graphs.spec import AttributeValue
from still_kernels.hybrid_attention.call import hybrid_attention as kernel
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState, state_names
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION
from still_kernels.torch_ops import ByName, call, register


def _compute(by_name: ByName, attributes: Mapping[str, AttributeValue], in_place: bool) -> dict[str, Tensor]:
    """Hybrid attention by the kernel for the device; the cache's slots define the capacity."""
    tensors = {name: tensor for name, tensor in by_name.items() if tensor is not None}
    chunk, salient = int(attributes["chunk_size"]), int(attributes["salient_per_chunk"])
    config = HybridAttentionConfig.from_attributes(
        attributes,
        num_heads=tensors["query"].shape[2],
        num_kv_heads=tensors["key"].shape[2],
        head_dim=tensors["query"].shape[3],
        feature_dim=tensors["feature_q_weight"].shape[1],
        gate="channel" if "gate" in tensors else "none",
        capacity_tokens=(tensors["past_salient_key"].shape[2] // max(salient, 1) + 2) * chunk,
    )
    states = {name: tensors[f"past_{name}"] for name in state_names(config)}
    # Factors stay a tensor: reading them would synchronize with the device and make a CUDA graph impossible.
    inputs = Inputs(**{field.name: tensors.get(field.name) for field in fields(Inputs)})  # type: ignore[arg-type]
    output, present = kernel(inputs, config, HybridAttentionState(length=tensors["past_length"], **states), in_place)
    found = present.tensors()
    return {"output": output, **{f"present_{name}": found[name] for name in states}}


register(HYBRID_ATTENTION, _compute)


def hybrid_attention(
    inputs: Inputs, config: HybridAttentionConfig, state: HybridAttentionState
) -> tuple[Tensor, HybridAttentionState]:
    """Call `torch.ops.still.hybrid_attention`: traces as one node, differentiable, runs on every device.

    Args:
        inputs: With `new_tokens`; the window factors, if the layer has any, are its own.
        config: The layer; its capacity is that of `state`.
        state: State before the call.

    Returns:
        output [B, T, H, D] and the state after the call.
    """
    assert inputs.new_tokens is not None
    past = {f"past_{name}": tensor for name, tensor in state.tensors().items()}
    by_name = {**vars(inputs), "window_factor": inputs.factor(config), **past}
    results = call(HYBRID_ATTENTION, by_name, config.attributes())
    present = {name.removeprefix("present_"): tensor for name, tensor in results.items() if name != "output"}
    return results["output"], HybridAttentionState(length=state.length + inputs.new_tokens, **present)


def hybrid_attention_(
    tensors: Sequence[Tensor | None],
    new_tokens: Tensor | None,
    length: Tensor | None,
    state: HybridAttentionState | None,
    config: HybridAttentionConfig,
) -> Tensor:
    """`hybrid_attention` that writes the new state into the tensors of `state` and returns only the output.

    Args:
        tensors: Query, key, value, gate or None, the two feature weights, window factors if the layer has any.
        length: Tokens before the call, [B]; that of `state` is not read.
    """
    assert new_tokens is not None and length is not None and state is not None
    states = [getattr(state, name) for name in _STATES]
    values = (*tensors, new_tokens, length, *states, *config.attribute_values)
    return torch.ops.still.hybrid_attention_(*values)


_STATES = tuple(s.name for s in HYBRID_ATTENTION.states)
