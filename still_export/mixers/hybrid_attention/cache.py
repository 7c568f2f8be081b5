"""The cache of one hybrid attention layer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from still_export.errors import CapacityError
from still_export.mixers.cache_layer import stay
from still_export.mixers.cache_type import narrower
from still_export.mixers.kernel_state import KernelStateLayer
from still_kernels.hybrid_attention.call import bind_decode
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION
from still_kernels.launcher import Bound


class HybridLayer(KernelStateLayer[HybridAttentionState]):
    """State of one hybrid attention layer; a static cache includes its window factors, because a capture cannot copy them from the host."""

    of = HybridAttentionState

    def __init__(self, config: HybridAttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.bounded = config.overflow == "error"
        self.factor: Tensor | None = None

    def empty(self, batch: int, columns: int, dtype: torch.dtype, device: torch.device) -> HybridAttentionState:
        slots = 0 if self.bounded else self.config.capacity_slots
        stored_dtype = narrower(self.config.cache, dtype)
        return HybridAttentionState.empty(self.config, batch, dtype, device, slots=slots, stored_dtype=stored_dtype)

    def grown(self, state: HybridAttentionState, columns: int) -> HybridAttentionState:
        if not self.bounded:
            return state
        needed = min(self.config.capacity_slots, self.config.slots_for(columns))
        if needed <= state.slots:
            return state
        # Doubling keeps copies rare in a long decode.
        return with_slots(state, min(self.config.capacity_slots, max(needed, 2 * state.slots)))

    def bind(self, inputs: Inputs, state: HybridAttentionState) -> Bound | None:
        return bind_decode(inputs, self.config, state)

    def allocate(self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        config = self.config
        if self.bounded and tokens > config.capacity_tokens:
            raise CapacityError(
                f"room for {tokens} tokens is asked for and capacity_tokens={config.capacity_tokens}. Generate fewer, raise "
                'capacity_tokens, or choose overflow="fold_oldest".'
            )
        super().allocate(batch, tokens, dtype, device)
        if config.window_factor is not None:
            self.factor = stay(torch.tensor(config.window_factor, device=device))

    def get_max_length(self) -> int:
        return self.config.capacity_tokens if self.bounded else -1


def with_slots(state: HybridAttentionState, slots: int) -> HybridAttentionState:
    """`state` with its salient cache padded to `slots` slots."""
    more = slots - state.slots
    grown = {s.name: s.growth.axis for s in HYBRID_ATTENTION.states if s.growth is not None}
    return replace(
        state,
        **{
            name: torch.nn.functional.pad(tensor, (*(0, 0) * (tensor.dim() - 1 - grown[name]), 0, more))
            for name, tensor in state.tensors().items()
            if name in grown
        },
    )
