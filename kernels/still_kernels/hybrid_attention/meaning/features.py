"""Feature maps phi of the linear part."""

from __future__ import annotations

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.hybrid_attention.config import HybridAttentionConfig

FEATURE_FLOOR = 1e-12


def feature_map(x: Tensor, weight: Tensor, config: HybridAttentionConfig) -> Tensor:
    """Map queries or keys to the features of the linear part.

    Args:
        x: Queries or keys after RoPE, one head per query head, [B, H, ..., D].
        weight: Projection per head (output row, input column), [H, P, D], or [1, P, D] shared.
        config: Names the map; shapes are checked against it.

    Returns:
        [B, H, ..., F] in float32 (float64 for float64 inputs).

    Raises:
        ShapeError: weight does not fit `config`.

    Source: STILL, arXiv:2602.02180 (norm-preserved map); LoLCATs (softmax_pm).
    """
    heads, rows, columns = weight.shape
    if heads not in (1, config.num_heads) or rows != config.projection_dim or columns != config.head_dim:
        raise ShapeError(
            f"feature weight is {list(weight.shape)}; expected [{config.num_heads} or 1, {config.projection_dim}, "
            f"{config.head_dim}] from num_heads, feature_dim and head_dim."
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    x, weight = x.to(wide), weight.to(wide)
    direction = torch.einsum("bh...d,hpd->bh...p", x, weight.expand(config.num_heads, -1, -1))
    name = config.feature_map
    if name == "identity":
        return direction
    if name == "np_softmax_pm":
        scale = x.norm(dim=-1, keepdim=True) / direction.norm(dim=-1, keepdim=True).clamp_min(FEATURE_FLOOR)
        direction = scale * direction
    if name in ("np_softmax_pm", "softmax_pm"):
        features = torch.cat([direction.softmax(-1), (-direction).softmax(-1)], dim=-1)
    elif name == "softmax":
        features = direction.softmax(-1)
    elif name == "relu":
        features = direction.relu()
    else:
        features = torch.nn.functional.elu(direction) + 1
    return features.clamp_min(FEATURE_FLOOR)
