"""The definition: a norm, a product, a sum. Readable, not fast."""

from __future__ import annotations

import torch
from torch import Tensor

from still_kernels.dense_matmul.inputs import Inputs


def naive_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Each token [.., I] over its root mean square, times weight [I]; in at least float32, rounded to the type of x."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (scaled * weight.to(wide.dtype)).to(x.dtype)


def naive_dense_matmul(inputs: Inputs) -> Tensor:
    """Tokens, normed where there is norm_weight, times the weight, in at least float32; plus the residual.

    Returns:
        [B, T, O], dtype of input.

    Raises:
        ShapeError: A tensor does not fit.
    """
    inputs.check()
    x = inputs.input
    if inputs.norm_weight is not None:
        x = naive_norm(x, inputs.norm_weight, inputs.norm_epsilon)
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = inputs.turned_weight.T if inputs.weight is None else inputs.weight  # type: ignore[union-attr]
    product = x.to(wide) @ weight.to(wide)
    if inputs.residual is not None:
        product += inputs.residual.to(wide)
    return product.to(x.dtype)
