"""What a product with a dense weight reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from still_graphs.errors import ShapeError


@dataclass(frozen=True)
class Inputs:
    """Tokens and weight of one call, of one type.

    input: [B, T, I].
    weight: [I, O]; None: `turned_weight` is given.
    turned_weight: The same as [O, I].
    norm_weight: [I], of the norm that tokens pass first; None: they do not.
    residual: [B, T, O], added to the product.
    epsilon: Added to the mean square of a token before its root divides the token.
    """

    input: Tensor
    weight: Tensor | None = None
    turned_weight: Tensor | None = None
    norm_weight: Tensor | None = None
    residual: Tensor | None = None
    epsilon: float = 1e-5

    @property
    def outputs(self) -> int:
        """Numbers of a token that come out."""
        return self.turned_weight.shape[0] if self.weight is None else self.weight.shape[1]  # type: ignore[union-attr]

    def check(self) -> None:
        """Raise ShapeError naming the tensor that does not fit."""
        if (self.weight is None) == (self.turned_weight is None):
            raise ShapeError("weight, turned_weight: one of them is wanted.")
        if self.input.dim() != 3:
            raise ShapeError(f"input: expected [B, T, I], got {list(self.input.shape)}.")
        batch, tokens, width = self.input.shape
        expected = {
            "weight": [width, self.outputs],
            "turned_weight": [self.outputs, width],
            "norm_weight": [width],
            "residual": [batch, tokens, self.outputs],
        }
        for name, shape in expected.items():
            given = getattr(self, name)
            if given is not None and (list(given.shape) != shape or given.dtype != self.input.dtype):
                raise ShapeError(
                    f"{name}: expected {shape} of {self.input.dtype}, got {list(given.shape)} of {given.dtype}."
                )
