"""The definition: whole sequences, every pair of tokens. Readable, not fast."""

from __future__ import annotations

import torch
from torch import Tensor

from still_graphs.errors import ShapeError


def check_inputs(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int]:
    """Batch and token counts of a call, or ShapeError naming the tensor that does not fit."""
    if query.dim() != 4 or key.dim() != 4:
        raise ShapeError(f"query, key: expected [B, T, H, D], got {list(query.shape)} and {list(key.shape)}.")
    batch, tokens, heads, dim = query.shape
    narrow = (batch, tokens, key.shape[2], dim)
    for name, tensor in (("key", key), ("value", value)):
        if tuple(tensor.shape) != narrow:
            raise ShapeError(f"{name}: expected {list(narrow)}, got {list(tensor.shape)}.")
    if heads % max(narrow[2], 1) or not narrow[2]:
        raise ShapeError(f"query has {heads} heads, which is no multiple of the {narrow[2]} of key.")
    return batch, tokens


def naive_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal softmax attention over whole sequences by its quadratic definition.

    Args:
        query: After RoPE, [B, T, H, D]; any float type, computed in at least float32.
        key, value: [B, T, HK, D], key after RoPE; query head h has key/value head h // (H / HK).

    Returns:
        [B, T, H, D], dtype of query.

    Raises:
        ShapeError: The shapes do not fit each other.
    """
    check_inputs(query, key, value)
    wide = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[2] // key.shape[2]
    q = query.transpose(1, 2).to(wide)
    k, v = (x.transpose(1, 2).repeat_interleave(group, dim=1).to(wide) for x in (key, value))
    position = torch.arange(query.shape[1], device=query.device)
    logits = (q @ k.transpose(-1, -2) * query.shape[3] ** -0.5).masked_fill(position[:, None] < position, -torch.inf)
    return (logits.softmax(-1) @ v).transpose(1, 2).to(query.dtype)
