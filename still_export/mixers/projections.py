"""What attention modules share: the projections of the module that they replace, norms, rotary positions."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from still_export.errors import UnsupportedError
from still_export.mixers.roles import PROJECTION


class ProjectedAttention(nn.Module):
    """The projections, and the norms of queries and keys, of a family's attention module.

    Args:
        base: The family's attention module; its submodules are taken over, not copied.
        head_dim: D.
    """

    weight_roles: ClassVar[dict[str, str]] = dict.fromkeys(
        ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"), PROJECTION
    )
    """Of parameters that are no vectors, by name (mixers/roles.py)."""
    cache: str | None = None
    """Type that keys and values are kept in; None: their own."""

    def __init__(self, base: Any, head_dim: int) -> None:
        super().__init__()
        self.layer_idx: int = base.layer_idx
        self.head_dim = head_dim
        self.use_rope = bool(getattr(base, "use_rope", True))  # SmolLM3 leaves some layers without positions
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = base.q_proj, base.k_proj, base.v_proj, base.o_proj
        self.q_norm: nn.Module | None = getattr(base, "q_norm", None)  # Qwen3
        self.k_norm: nn.Module | None = getattr(base, "k_norm", None)

    def project_heads(
        self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, T, H, D] and key [B, T, HK, D] after norm and RoPE, value [B, T, HK, D], of hidden [B, T, channels]."""
        heads = (*hidden.shape[:-1], -1, self.head_dim)
        query, key, value = (proj(hidden).view(heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.use_rope:
            if position_embeddings is None:
                raise UnsupportedError(
                    f"{type(self).__name__} needs position_embeddings (cos, sin) from the model's rotary module."
                )
            cos, sin = (x[:, :, None] for x in position_embeddings)
            if query.shape[1] == 1 and not torch.compiler.is_compiling():
                # What a single token costs are launches: one for both instead of one each.
                both = rotate(torch.cat((query, key), dim=2), cos, sin)
                query, key = both.split((query.shape[2], key.shape[2]), dim=2)
            else:
                query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        return query, key, value


def wants_gradients(x: Tensor) -> bool:
    """Whether operations on `x` are to be differentiated."""
    return torch.is_grad_enabled() and x.requires_grad


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to the first R channels of [B, T, h, D]; cos, sin [B or 1, T, 1, R] pair channel i with i + R/2."""
    turned = cos.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat((rotate(x[..., :turned], cos, sin), x[..., turned:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
