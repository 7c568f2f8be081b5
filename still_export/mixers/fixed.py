"""Layers with states of fixed size: their cache, and how a module reads and writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from still_export.errors import UnsupportedError, UnsupportedModelError
from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.cache_layer import LayerT, Progress, StillCacheLayer, part_of, refill, stay
from still_export.mixers.kernel_state import KernelStateLayer, State
from still_graphs.spec import StateSpec

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class FixedStates(StillCacheLayer):
    """The fixed-size states of one layer's ops."""

    def __init__(self, ops: Sequence[LayerOp]) -> None:
        super().__init__()
        self.ops = tuple(ops)
        self.tensors: dict[str, Tensor] = {}

    def take(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """The states to continue from, by name."""
        if not self.tensors:
            assert self.new_tokens is not None
            self.tensors = zero_states(self.ops, self.new_tokens.shape[0], dtype, device)
            self.is_initialized = True
        return self.tensors

    def allocate(self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensors = {name: stay(x) for name, x in zero_states(self.ops, batch, dtype, device).items()}

    def store(self, states: Mapping[str, Tensor]) -> None:
        """Store the states after the call."""
        if self.fixed:
            for name, tensor in states.items():
                refill(self.tensors[name], tensor)
        else:
            self.tensors = dict(states)

    def states(self) -> dict[str, Tensor]:
        return {name: x.clone() for name, x in self.tensors.items()} if self.fixed else self.tensors

    def load(self, states: Mapping[str, Tensor]) -> None:
        self.tensors = dict(states)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self.store({name: change(x) for name, x in self.tensors.items()})

    def reset(self) -> None:
        if self.fixed:
            self.store({name: torch.zeros_like(x) for name, x in self.tensors.items()})
        else:
            super().reset()
            self.tensors = {}


def fixed_states(ops: Sequence[LayerOp]) -> dict[str, tuple[StateSpec, LayerOp]]:
    """The fixed-size states of `ops`, by name, with their ops."""
    return {s.name: (s, op) for op in ops for s in op.spec.states_with(op.attributes) if s.growth is None}


def zero_states(ops: Sequence[LayerOp], batch: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Zero states of `batch` sequences by name; states that are always float32 are float64 for float64 activations."""
    wide = torch.promote_types(dtype, torch.float32)
    return {
        name: torch.zeros(
            state.sizes({**op.symbols, "B": batch}), dtype=dtype if state.dtype == "T" else wide, device=device
        )
        for name, (state, op) in fixed_states(ops).items()
    }


def class_for(base: nn.Module, classes: Mapping[str, type[ModuleT]], what: str) -> type[ModuleT]:
    """The class that replaces `base`; `classes` is keyed by the name of the family's class.

    Raises:
        UnsupportedModelError: `base` is of another class; `what` names the expected one in the message.
    """
    name = type(base).__name__
    if name not in classes:
        raise UnsupportedModelError(f"{name} is no {what} that is covered: {', '.join(classes)}.")
    return classes[name]


def demand_silu(base: nn.Module) -> None:
    """Raise UnsupportedModelError if a family's convolutions do not use silu."""
    if base.activation != "silu":
        raise UnsupportedModelError(
            f"hidden_act={base.activation!r} in config.json is the activation of the convolutions of {type(base).__name__}; "
            "only silu is covered."
        )


def sizes_of(config: Any, names: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Sizes of a layer; each is the first of the families' field names that `config` has."""
    return {
        what: int(next(value for name in own if (value := getattr(config, name, None)) is not None))
        for what, own in names.items()
    }


def states_of(
    cache: Any, index: int, ops: Sequence[LayerOp], hidden: Tensor
) -> tuple[dict[str, Tensor], Tensor, FixedStates | None]:
    """States of layer `index`, new tokens [B], and the cache layer to store into; without a cache, zero states and all of `hidden`.

    Raises:
        UnsupportedError: `cache` is not a STILL model's.
    """
    batch, tokens = hidden.shape[:2]
    if cache is None:
        counts = torch.full((batch,), tokens, dtype=torch.int64, device=hidden.device)
        return zero_states(ops, batch, hidden.dtype, hidden.device), counts, None
    layer = part_of(cache, index, FixedStates)
    if layer is None or layer.new_tokens is None:
        raise UnsupportedError(
            f"layer {index} has states of its own and got a {type(cache).__name__}; "
            "pass past_key_values=StillCache.empty(model.config), or none, to the model's forward."
        )
    return layer.take(hidden.dtype, hidden.device), layer.new_tokens, layer


class WithFixedStates(KernelStateLayer[State]):
    """Mixed in before a cache layer with one state, for a layer of two mixers: `second_mixer` has the other's fixed-size states.

    Args:
        own: Arguments of the cache layer itself.
    """

    def __init__(self, ops: Sequence[LayerOp], *own: Any) -> None:
        self.second_mixer = FixedStates(ops)
        super().__init__(*own)

    @property
    def progress(self) -> Progress:
        return self.second_mixer.progress

    @progress.setter
    def progress(self, progress: Progress) -> None:
        self.second_mixer.progress = progress

    @property
    def fixed(self) -> bool:
        return self.second_mixer.fixed

    @fixed.setter
    def fixed(self, fixed: bool) -> None:
        self.second_mixer.fixed = fixed

    def part(self, kind: type[LayerT]) -> LayerT | None:
        return super().part(kind) or self.second_mixer.part(kind)

    def allocate(self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        super().allocate(batch, tokens, dtype, device)
        self.second_mixer.allocate(batch, tokens, dtype, device)

    def states(self) -> dict[str, Tensor]:
        return self.second_mixer.states() | super().states()

    def load(self, states: Mapping[str, Tensor]) -> None:
        others = fixed_states(self.second_mixer.ops)
        super().load({name: x for name, x in states.items() if name not in others})
        self.second_mixer.load({name: x for name, x in states.items() if name in others})

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        super().map_rows(change)
        self.second_mixer.map_rows(change)

    def reset(self) -> None:
        super().reset()
        self.second_mixer.reset()


class FixedStateModule(nn.Module):
    """A module that replaces a family's, with fixed-size states; submodules and parameters are the family's."""

    def __init__(self, base: Any, ops: Sequence[LayerOp]) -> None:
        super().__init__()
        self.layer_idx: int = base.layer_idx
        self.ops = tuple(ops)
        for name, child in base.named_children():
            self.add_module(name, child)
        for name, parameter in base.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def begin(self, hidden: Tensor, cache: Any) -> tuple[dict[str, Tensor], Tensor, FixedStates | None]:
        return states_of(cache, self.layer_idx, self.ops, hidden)


class FixedStatesMixer(Mixer):
    """Layers of families that have only states of fixed size.

    modules, what: See `classes` and `what` of `class_for`.
    """

    of_families = True
    modules: ClassVar[Mapping[str, type[FixedStateModule]]]
    what: ClassVar[str]

    def cache_layer(self, config: Any, index: int) -> FixedStates:
        return FixedStates(self.ops(config, index))

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        return class_for(base, self.modules, self.what)(base, self.ops(config, index))
