"""What a cache holds of a layer whose softmax attention has states of fixed size beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.base import LayerOp, LayerT
from still_export.mixers.fixed import FixedStates


class AttentionAndFixedStates(AttentionLayer):
    """Keys and values, and `fixed`, the states of the ops `ops`."""

    def __init__(self, heads: int, dim: int, cache: str | None, ops: Sequence[LayerOp]) -> None:
        super().__init__(heads, dim, cache)
        self.fixed = FixedStates(ops)

    def part(self, kind: type[LayerT]) -> LayerT | None:
        return super().part(kind) or self.fixed.part(kind)

    def begin(self, new_tokens: Tensor, columns: int | None) -> None:
        super().begin(new_tokens, columns)
        self.fixed.begin(new_tokens, columns)

    def states(self) -> dict[str, Tensor]:
        return self.fixed.states() | super().states()

    def load(self, states: Mapping[str, Tensor], length: Tensor) -> None:
        own = {name: x for name, x in states.items() if name in ("key", "value")}
        super().load(own, length)
        self.fixed.load({name: x for name, x in states.items() if name not in own}, length)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        super().map_rows(change)
        self.fixed.map_rows(change)

    def reset(self) -> None:
        super().reset()
        self.fixed.reset()
