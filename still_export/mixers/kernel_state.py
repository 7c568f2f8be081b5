"""A cache layer for kernels that write the state in place and reuse a decode step's prepared launches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from still_export.mixers.cache_layer import StillCacheLayer, refill, stay
from still_kernels.launcher import Bound

State = TypeVar("State", bound=Any)
"""A frozen dataclass of tensors, `length` among them, with `tensors()`."""


class KernelStateLayer(StillCacheLayer, Generic[State]):
    """The state of one layer; its length may be out of date (that of an earlier call).

    `owned`: The state's tensors have no other users, so a call may write into them. Copying them for every token would cost more than a
    decode step.
    """

    of: Callable[..., State]
    """The class of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.owned = True
        self._step: Bound | None = None

    @abstractmethod
    def empty(self, batch: int, columns: int, dtype: torch.dtype, device: torch.device) -> State:
        """An empty state for calls with `columns` columns in all."""

    @abstractmethod
    def grown(self, state: State, columns: int) -> State:
        """`state`, or a copy with room for `columns` columns."""

    @abstractmethod
    def bind(self, inputs: Any, state: State) -> Bound | None:
        """A prepared decode step like the one with `inputs` on `state`; None: not available."""

    def make_room(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make room in the state for the tokens of the announced call."""
        if self.fixed:
            return
        if self.state is None:
            assert self.new_tokens is not None
            self._set(self.empty(self.new_tokens.shape[0], self.progress.columns, dtype, device))
            self.is_initialized = True
        assert self.state is not None
        if self.progress.grows:
            grown = self.grown(self.state, self.progress.columns)
            if grown is not self.state:
                self._set(grown)

    def take(self, dtype: torch.dtype, device: torch.device) -> State:
        """The state to continue from, with room for the tokens of the announced call."""
        self.make_room(dtype, device)
        assert self.state is not None
        return replace(self.state, length=self.length)

    def store(self, state: State) -> None:
        self._set(state)
        self.owned = True

    def decode_step(self, inputs: Any) -> Bound | None:
        """A prepared decode step on the state in place; None: not available."""
        query: Tensor = inputs.query
        self.make_room(query.dtype, query.device)
        if self._step is None or self._step.dtype != query.dtype:
            self._step = self.bind(inputs, self.take(query.dtype, query.device))
        return self._step

    def allocate(self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        state = self.grown(self.empty(batch, tokens, dtype, device), tokens)
        for tensor in state.tensors().values():
            stay(tensor)
        self.state = state

    def _set(self, state: State) -> None:
        """Store a state; in a static cache, copy its values."""
        if self.fixed:
            for name, tensor in self._tensors().items():
                refill(tensor, getattr(state, name))
        else:
            self.state, self._step = state, None

    def _tensors(self) -> dict[str, Tensor]:
        assert self.state is not None, "the cache is empty"
        found: dict[str, Tensor] = self.state.tensors()
        return {name: tensor for name, tensor in found.items() if name != "length"}

    def states(self) -> dict[str, Tensor]:
        if self.fixed:
            return {name: tensor.clone() for name, tensor in self._tensors().items()}
        self.owned = False
        return self._tensors()

    def load(self, states: Mapping[str, Tensor]) -> None:
        self._set(self.of(**states, length=self.length))
        self.owned = False

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self._set(replace(self.state, **{name: change(x) for name, x in self._tensors().items()}))

    def reset(self) -> None:
        if self.fixed:
            for tensor in self._tensors().values():
                tensor.zero_()
        else:
            super().reset()
            self.state = self._step = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_step": None}  # of tensor addresses, which a copy does not share
