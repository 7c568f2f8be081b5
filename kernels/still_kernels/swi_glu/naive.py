"""The definition: one half by its sigmoid and by the other half. Readable, not fast."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from still_kernels.swi_glu.inputs import Inputs


def naive_swi_glu(inputs: Inputs) -> Tensor:
    """silu(gate) * up, computed in at least float32.

    Returns:
        [B, T, width], dtype of input.

    Raises:
        ShapeError: The input has not twice the width.
    """
    inputs.check()
    x = inputs.input
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return (silu(gate) * up).to(x.dtype)
