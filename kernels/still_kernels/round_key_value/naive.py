"""The definition: rows written in 8 bits, and read."""

from __future__ import annotations

from torch import Tensor

from still_kernels.codes import rounded
from still_kernels.round_key_value.inputs import Inputs


def naive_round_key_value(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Keys and values, each head of a token rounded to codes by a scale of its own.

    Returns:
        [B, T, HK, D] each, dtype of the inputs.

    Raises:
        ShapeError: A tensor does not fit.
    """
    inputs.check()
    return rounded(inputs.key), rounded(inputs.value)
