"""AllMem's layers: softmax over the latest tokens, and a memory trained at test time.

The source is AllMem's abstract (arXiv:2602.13680): sliding window attention and a non-linear memory with test-time training replace a
pretrained model's attention. The memory is LaCT's (arXiv:2505.23884): SwiGLU weights, chunks, momentum, Muon's step and norms of rows.
The layers are a reading, not the authors' model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers.utils.generic import maybe_autocast

from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.fixed import WithFixedStates, states_of
from still_export.mixers.hybrid_attention.cache import HybridLayer
from still_export.mixers.hybrid_attention.window import WindowModule, window_of
from still_export.mixers.layers import head_size
from still_export.mixers.projections import ProjectedAttention
from still_export.mixers.roles import FEATURE_MAP, GATE, NORM
from still_export.mixers.trainable import TrainableModule
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION
from still_kernels.test_time_memory.meaning import Inputs, MemoryState, read_and_learn
from still_kernels.test_time_memory.spec import ROW_EPSILON, TEST_TIME_MEMORY

WIDER = 2
"""Hidden channels of a memory, as a multiple of a head's channels."""
BASE_RATE = 0.01
"""Learning rate of an untrained memory, as in LaCT."""
NORM_EPSILON = 1e-6


class WindowAndMemory(WithFixedStates[HybridAttentionState], HybridLayer):
    """Keys and values of the window, and the states of the memory."""


class AllMem(WindowModule):
    """One memory per key/value head, read by its group's queries. Queries and keys before RoPE are scaled and shifted by channel, passed
    through silu and normalized to unit length; values pass through silu. The normed memory output times silu of a gate per query head is
    added to the window's output. The gate starts at 0, so the layer starts as its window.
    """

    weight_roles: ClassVar[dict[str, str]] = ProjectedAttention.weight_roles | {
        "memory_weight": FEATURE_MAP,
        "memory_query": NORM,
        "memory_key": NORM,
        "rate_proj.weight": GATE,
        "momentum_proj.weight": GATE,
        "memory_gate.weight": GATE,
    }
    fresh = ("memory_", "rate_proj.", "momentum_proj.")

    def __init__(self, base: Any, window: HybridAttentionConfig, hidden_size: int, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, window)
        self.ops = tuple(ops)
        like: dict[str, Any] = {"device": base.q_proj.weight.device, "dtype": base.q_proj.weight.dtype}
        heads, key_heads, dim = window.num_heads, window.num_kv_heads, window.head_dim
        self.memory_weight = nn.Parameter(torch.empty(key_heads, 3, WIDER * dim, dim, **like))
        self.memory_query = nn.Parameter(torch.empty(2, heads, dim, **like))  # scale, shift
        self.memory_key = nn.Parameter(torch.empty(2, key_heads, dim, **like))
        self.memory_norm = nn.Parameter(torch.empty(dim, **like))
        self.memory_gate = nn.Linear(hidden_size, heads, **like)
        self.rate_proj = nn.Linear(hidden_size, 3 * key_heads, **like)
        self.momentum_proj = nn.Linear(hidden_size, key_heads, **like)
        self.reset_parameters()

    def initial(self, name: str) -> Tensor:
        parameter = self.get_parameter(name)
        shape, dtype = parameter.shape, parameter.dtype
        if name == "memory_weight":
            random = torch.Generator().manual_seed(self.layer_idx)
            weight = torch.randn(shape, generator=random) * shape[-1] ** -0.5
            weight[:, 2] *= (shape[-1] / shape[-2]) ** 0.5
            return weight.to(dtype)
        if name in ("memory_query", "memory_key"):
            return torch.tensor([1.0, 0.0], dtype=dtype)[:, None, None].repeat(1, *shape[1:])
        if name == "rate_proj.bias":
            return torch.full(shape, BASE_RATE).expm1().log().to(dtype)
        return (torch.ones if name == "memory_norm" else torch.zeros)(shape, dtype=dtype)

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        query, key, value = self.heads(hidden)
        with maybe_autocast(value.device.type, enabled=False):  # the memory's weights need float32
            memory = self.remembered(hidden, query, key, value, past_key_values)
        query, key = (x.to(value.dtype) for x in self.turned(query, key, position_embeddings))
        return self.o_proj((self.windowed(query, key, value, past_key_values) + memory).flatten(2))

    def remembered(self, hidden: Tensor, query: Tensor, key: Tensor, value: Tensor, past_key_values: Any) -> Tensor:
        """The memory's contribution to heads [B, T, H, D], from query, key and value before RoPE."""
        wide, dtype = torch.promote_types(value.dtype, torch.float32), value.dtype
        hidden = hidden.to(wide)

        def projected(of: nn.Linear) -> Tensor:
            bias: Tensor = of.bias
            return hidden @ of.weight.to(wide).T + bias.to(wide)

        def scaled(x: Tensor, by: Tensor) -> Tensor:
            x = silu(x.to(wide) * by[0].to(wide) + by[1].to(wide))
            return (x / (x.norm(dim=-1, keepdim=True) + ROW_EPSILON)).to(dtype)

        states, new_tokens, layer = states_of(past_key_values, self.layer_idx, self.ops, hidden)
        past = torch.zeros_like(new_tokens) if layer is None or layer.length is None else layer.length
        key_heads = self.still.num_kv_heads
        inputs = Inputs(
            scaled(query, self.memory_query).unflatten(2, (key_heads, -1)),
            scaled(key, self.memory_key),
            silu(value),
            softplus(projected(self.rate_proj)).unflatten(-1, (key_heads, 3)),
            projected(self.momentum_proj).sigmoid(),
            self.memory_weight.to(wide),
            new_tokens,
            past,
            **self.ops[0].attributes,  # type: ignore[arg-type]  # by their own names
        )
        output, after = read_and_learn(inputs, MemoryState(**states))
        if layer is not None:
            layer.store(after._asdict())
        rows = output.flatten(2, 3).to(wide)
        rows = rows * torch.rsqrt((rows * rows).mean(-1, keepdim=True) + NORM_EPSILON) * self.memory_norm.to(wide)
        return (rows * silu(projected(self.memory_gate))[..., None]).to(dtype)


class TrainableAllMem(TrainableModule, AllMem):
    """AllMem as teacher and student."""


class AllMemMixer(Mixer):
    """Layers of type "allmem". Window and memory chunk have the model's `chunk_size`, so each token is in exactly one of them."""

    name = "allmem"
    trained = TrainableAllMem
    settings = ("chunk_size",)

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        window = window_of(config, config.still.chunk_size)
        return LayerOp(HYBRID_ATTENTION, window.attributes(), window.symbols()), *self._fixed_ops(config)

    def cache_layer(self, config: Any, index: int) -> WindowAndMemory:
        return WindowAndMemory(self._fixed_ops(config), window_of(config, config.still.chunk_size))

    def module(self, base: nn.Module, config: Any, index: int) -> AllMem:
        window = window_of(config, config.still.chunk_size)
        return AllMem(base, window, config.hidden_size, self._fixed_ops(config))

    def _fixed_ops(self, config: Any) -> tuple[LayerOp, ...]:
        heads, key_heads, dim = config.num_attention_heads, config.num_key_value_heads, head_size(config)
        sizes = {"H": key_heads, "G": heads // key_heads, "D": dim, "M": WIDER * dim}
        return (LayerOp(TEST_TIME_MEMORY, {"chunk_size": config.still.chunk_size, "memory_update": "muon"}, sizes),)


MIXERS = (AllMemMixer(),)
