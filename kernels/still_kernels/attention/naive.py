"""The definition: whole sequences, every pair of tokens. Readable, not fast."""

from __future__ import annotations

import torch
from torch import Tensor

from still_kernels.attention.inputs import Inputs


def naive_attention(inputs: Inputs) -> Tensor:
    """Causal softmax attention over whole sequences by its quadratic definition, in at least float32; `new_tokens` are not read.

    Returns:
        [B, T, H, D], dtype of query.

    Raises:
        ShapeError: The shapes do not fit each other.
    """
    _, tokens = inputs.check()
    query = inputs.query
    wide = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[2] // inputs.key.shape[2]
    q = query.transpose(1, 2).to(wide)
    k, v = (x.transpose(1, 2).repeat_interleave(group, dim=1).to(wide) for x in (inputs.key, inputs.value))
    position = torch.arange(tokens, device=query.device)
    logits = (q @ k.transpose(-1, -2) * query.shape[3] ** -0.5).masked_fill(position[:, None] < position, -torch.inf)
    return (logits.softmax(-1) @ v).transpose(1, 2).to(query.dtype)
