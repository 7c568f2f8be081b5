"""The definition: a sum, a norm. Readable, not fast."""

from __future__ import annotations

from torch import Tensor

from still_kernels.add_rms_norm.inputs import Inputs
from still_kernels.dense_matmul.naive import naive_norm


def naive_add_rms_norm(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The sum, and the norm of the rounded sum, computed in at least float32.

    Returns:
        [B, T, I] each, dtype of input.

    Raises:
        ShapeError: A tensor does not fit.
    """
    inputs.check()
    total = inputs.input if inputs.residual is None else inputs.input + inputs.residual
    return total, naive_norm(total, inputs.norm_weight, inputs.norm_epsilon)
