"""State of one hybrid attention layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from still_graphs.errors import ShapeError, UnsupportedError
from still_graphs.spec import StateSpec
from still_kernels.codes import dequantized, quantized
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION


def state_shape(config: HybridAttentionConfig, name: str, batch: int, slots: int) -> tuple[int, ...]:
    """Shape of the state tensor `name` for `batch` rows and `slots` salient slots, from the OpSpec."""
    return _specs(config)[name].sizes({**config.symbols(), "B": batch, "N": slots})


@lru_cache
def _specs(config: HybridAttentionConfig) -> dict[str, StateSpec]:
    return {s.name: s for s in HYBRID_ATTENTION.states_with(config.attributes())}


def state_names(config: HybridAttentionConfig) -> tuple[str, ...]:
    """Names of the state tensors that `config` has, in the order of the OpSpec."""
    return tuple(_specs(config))


@lru_cache  # called for every call of the op
def _state_shapes(config: HybridAttentionConfig, batch: int, slots: int) -> dict[str, tuple[int, ...]]:
    return {name: state_shape(config, name, batch, slots) for name in state_names(config)}


_IN_CODES = tuple(s.name for s in HYBRID_ATTENTION.states if s.narrow)


@dataclass(frozen=True)
class HybridAttentionState:
    """State after `length` tokens; all-zero means empty.

    Shapes are those of the OpSpec: window_* are rings (position p in slot p mod 2C), rank r of chunk c is in salient slot
    k*c + r (modulo N with fold_oldest). kv_state, z_state and scores are float32, or float64 for float64 inputs.
    With cache="int8" keys and values are words, [..., D / 4] int32, with scales, [...] float32 (`still_kernels.codes`).
    """

    window_key: Tensor
    window_value: Tensor
    window_score: Tensor
    salient_key: Tensor
    salient_value: Tensor
    kv_state: Tensor
    z_state: Tensor
    length: Tensor
    window_key_scale: Tensor | None = None
    window_value_scale: Tensor | None = None
    salient_key_scale: Tensor | None = None
    salient_value_scale: Tensor | None = None

    @classmethod
    def empty(
        cls,
        config: HybridAttentionConfig,
        batch: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        slots: int | None = None,
        stored_dtype: torch.dtype | None = None,
    ) -> HybridAttentionState:
        """State of `batch` empty rows; `slots` defaults to `config.capacity_slots`, and `stored_dtype`, the type of window and cache, to
        `dtype`."""
        count = config.capacity_slots if slots is None else slots
        wide = torch.promote_types(dtype, torch.float32)
        kinds = {"T": stored_dtype or dtype, "float32": wide, "int32": torch.int32}
        tensors = {
            name: torch.zeros(state_shape(config, name, batch, count), dtype=kinds[spec.dtype], device=device)
            for name, spec in _specs(config).items()
        }
        return cls(length=torch.zeros(batch, dtype=torch.int64, device=device), **tensors)

    @property
    def slots(self) -> int:
        """N, slots of the salient cache."""
        return self.salient_key.shape[2]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that exist, by name, `length` last."""
        found = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        found["length"] = found.pop("length")
        return found

    def dequantized(self, dtype: torch.dtype) -> HybridAttentionState:
        """The state with keys and values as numbers."""
        changed: dict[str, Tensor | None] = dict.fromkeys(f"{name}_scale" for name in _IN_CODES)
        for name in _IN_CODES:
            changed[name] = dequantized(getattr(self, name), getattr(self, f"{name}_scale"), dtype)
        return replace(self, **changed)  # type: ignore[arg-type]

    def quantized(self) -> HybridAttentionState:
        """The state with keys and values in 8 bits; values that were read from 8 bits are exact."""
        changed = {}
        for name in _IN_CODES:
            changed[name], changed[f"{name}_scale"] = quantized(getattr(self, name))
        return replace(self, **changed)

    def check(self, config: HybridAttentionConfig, batch: int) -> None:
        """Raise ShapeError unless every tensor has the shape for `config` and `batch`, UnsupportedError for S in bfloat16."""
        if self.kv_state.dtype == torch.bfloat16:
            raise UnsupportedError(
                "kv_state is bfloat16: without the rest beside it sums stop growing. It has one in an engine's pages alone; pass float32."
            )
        for name, expected in _state_shapes(config, batch, self.slots).items():
            tensor = getattr(self, name)
            if tensor is None or tensor.shape != expected:
                got = "nothing" if tensor is None else list(tensor.shape)
                raise ShapeError(
                    f"state {name}: expected {list(expected)}, got {got}. Start from HybridAttentionState.empty."
                )
        if config.overflow != "error" and self.slots % max(config.salient_per_chunk, 1):
            raise ShapeError(
                f"{self.slots} salient slots with overflow={config.overflow!r}: pass a multiple of "
                f"salient_per_chunk={config.salient_per_chunk}."
            )
        if tuple(self.length.shape) != (batch,):
            raise ShapeError(f"state length: expected [{batch}], got {list(self.length.shape)}.")
