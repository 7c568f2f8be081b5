"""The definition: two products and a sum. Readable, not fast."""

from __future__ import annotations

import torch
from torch import Tensor

from still_kernels.low_rank_matmul.inputs import Inputs


def naive_low_rank_matmul(inputs: Inputs) -> Tensor:
    """base + (input inner) outer, computed in at least float32; what lies between the products is rounded.

    Returns:
        [B, T, O], dtype of input.

    Raises:
        ShapeError: A tensor does not fit.
    """
    inputs.check()
    dtype = inputs.input.dtype
    wide = torch.promote_types(dtype, torch.float32)
    low = (inputs.input.to(wide) @ inputs.inner.to(wide)).to(dtype)
    result = low.to(wide) @ inputs.outer.to(wide)
    return (result if inputs.base is None else result + inputs.base.to(wide)).to(dtype)
