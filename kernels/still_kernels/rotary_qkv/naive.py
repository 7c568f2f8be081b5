"""The definition: a split, two rotations, a sigmoid. Readable, not fast."""

from __future__ import annotations

import torch
from torch import Tensor

from still_kernels.rotary_qkv.inputs import Inputs


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [B, T, H * D] by angles [B, T, D]."""
    heads = x.unflatten(2, (-1, cos.shape[2]))
    first, second = heads.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (heads * cos[:, :, None] + turned * sin[:, :, None]).flatten(2)


def naive_rotary_qkv(inputs: Inputs) -> tuple[Tensor, ...]:
    """Query, key, value and, where there is one, gate; computed in at least float32.

    Returns:
        [B, T, width] each, dtype of input.

    Raises:
        ShapeError: A tensor or width does not fit.
    """
    inputs.check()
    dtype = inputs.input.dtype
    wide = torch.promote_types(dtype, torch.float32)
    whole = inputs.input if inputs.gate_input is None else torch.cat((inputs.input, inputs.gate_input), -1)
    query, key, value, gate = whole.to(wide).split(inputs.widths, -1)
    cos, sin = inputs.cos.to(wide), inputs.sin.to(wide)
    results = [rotated(query, cos, sin), rotated(key, cos, sin), value]
    if inputs.gate_width:
        results.append(torch.sigmoid(gate if inputs.gate_bias is None else gate + inputs.gate_bias.to(wide)))
    return tuple(x.to(dtype) for x in results)
