"""The definition: norm, two products, a gate, a product, a sum. Readable, not fast."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from still_kernels.dense_matmul.naive import naive_norm
from still_kernels.gated_mlp.inputs import Inputs


def naive_gated_mlp(inputs: Inputs) -> Tensor:
    """input + (silu(gate) * up) @ down, gate and up the halves of norm(input) @ gate_up; products in at least float32.

    Returns:
        [B, T, I], dtype of input.

    Raises:
        ShapeError: A tensor does not fit.
    """
    inputs.check()
    x = inputs.input
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = naive_norm(x, inputs.norm_weight, inputs.norm_epsilon)
    gate, up = (rows.to(wide) @ inputs.gate_up.to(wide)).chunk(2, -1)
    middle = (silu(gate) * up).to(x.dtype)
    return (x.to(wide) + middle.to(wide) @ inputs.down.to(wide)).to(x.dtype)
