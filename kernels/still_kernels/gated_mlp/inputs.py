"""What a feed-forward layer reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from still_graphs.errors import ShapeError


@dataclass(frozen=True)
class Inputs:
    """Tokens and weights of one call, of one type.

    input: [B, T, I]; also what the result is added to.
    norm_weight: [I].
    down: [M, I].
    gate_up: [I, 2 * M], the gate's outputs first.
    epsilon: Added to the mean square of a token before its root divides the token.
    """

    input: Tensor
    norm_weight: Tensor
    down: Tensor
    gate_up: Tensor
    epsilon: float = 1e-5

    def check(self) -> None:
        """Raise ShapeError naming the tensor that does not fit."""
        if self.input.dim() != 3 or self.down.dim() != 2:
            raise ShapeError(
                f"input, down: expected [B, T, I], [M, I], got {list(self.input.shape)}, {list(self.down.shape)}."
            )
        width, middle = self.input.shape[2], self.down.shape[0]
        for name, shape in (("norm_weight", [width]), ("down", [middle, width]), ("gate_up", [width, 2 * middle])):
            given = getattr(self, name)
            if list(given.shape) != shape or given.dtype != self.input.dtype:
                raise ShapeError(
                    f"{name}: expected {shape} of {self.input.dtype}, got {list(given.shape)} of {given.dtype}."
                )
