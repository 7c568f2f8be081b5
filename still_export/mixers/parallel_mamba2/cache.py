"""What a cache holds of a layer whose softmax attention has states of fixed size beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.base import LayerOp, LayerT, Progress
from still_export.mixers.fixed import FixedStates


class AttentionAndFixedStates(AttentionLayer):
    """Keys and values, and `beside` them the states of the ops `ops`."""

    def __init__(self, heads: int, dim: int, cache: str | None, ops: Sequence[LayerOp]) -> None:
        self.beside = FixedStates(ops)
        super().__init__(heads, dim, cache)

    @property
    def progress(self) -> Progress:
        return self.beside.progress

    @progress.setter
    def progress(self, progress: Progress) -> None:
        self.beside.progress = progress

    @property
    def fixed(self) -> bool:
        return self.beside.fixed

    @fixed.setter
    def fixed(self, fixed: bool) -> None:
        self.beside.fixed = fixed

    def part(self, kind: type[LayerT]) -> LayerT | None:
        return super().part(kind) or self.beside.part(kind)

    def allocate(self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        super().allocate(batch, tokens, dtype, device)
        self.beside.allocate(batch, tokens, dtype, device)

    def states(self) -> dict[str, Tensor]:
        return self.beside.states() | super().states()

    def load(self, states: Mapping[str, Tensor]) -> None:
        own = {name: x for name, x in states.items() if name in ("key", "value")}
        super().load(own)
        self.beside.load({name: x for name, x in states.items() if name not in own})

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        super().map_rows(change)
        self.beside.map_rows(change)

    def reset(self) -> None:
        super().reset()
        self.beside.reset()
