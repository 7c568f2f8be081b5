"""Layers of Parallax and local linear attention."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from still_export.mixers.attention.keyed import KeyedAttention
from still_export.mixers.attention.mixer import KeysMixer, sizes
from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import class_for
from still_export.mixers.layers import head_size
from still_export.mixers.projections import rotate
from still_export.mixers.roles import PROJECTION
from still_kernels.local_linear_attention.meaning import Inputs, local_linear_attention
from still_kernels.local_linear_attention.spec import LOCAL_LINEAR_ATTENTION


class LocalLinearAttention(KeyedAttention):
    """Local linear attention (arXiv:2510.01450): a correction by ridge regression, with one ridge for all heads."""

    def __init__(self, base: Any, head_dim: int) -> None:
        super().__init__(base, head_dim)
        self.ridge = base.ridge

    def extra_inputs(self, hidden: Tensor, turn: tuple[Tensor, Tensor] | None, query: Tensor) -> dict[str, Any]:
        """Further inputs of the op, besides query [B, T, H, D], keys and values."""
        wide = torch.promote_types(query.dtype, torch.float32)
        return {"ridge": torch.full((query.shape[2],), self.ridge, dtype=wide, device=query.device)}

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        heads = self.project_heads(hidden, position_embeddings)
        extra_inputs = self.extra_inputs(hidden, position_embeddings, heads[0])
        output = self.attended(local_linear_attention, Inputs, heads, past_key_values, **extra_inputs)
        return self.o_proj(output.flatten(2))


class Parallax(LocalLinearAttention):
    """Parallax (arXiv:2605.29157): the correction is a projection, normed and rotated like queries."""

    weight_roles: ClassVar[dict[str, str]] = {**KeyedAttention.weight_roles, "r_proj.weight": PROJECTION}

    def __init__(self, base: Any, head_dim: int) -> None:
        super().__init__(base, head_dim)
        self.r_proj, self.r_norm = base.r_proj, getattr(base, "r_norm", None)

    def extra_inputs(self, hidden: Tensor, turn: tuple[Tensor, Tensor] | None, query: Tensor) -> dict[str, Any]:
        assert turn is not None
        correction = self.r_proj(hidden).view(query.shape)
        correction = correction if self.r_norm is None else self.r_norm(correction)
        return {"correction": rotate(correction, *(x[:, :, None] for x in turn))}


MODULES: dict[str, type[LocalLinearAttention]] = {"FlaParallax": Parallax, "FlaLocalLinear": LocalLinearAttention}


class LocalLinearAttentionMixer(KeysMixer):
    name = "local_linear_attention"
    of_families = True
    as_numbers = "corrects values by keys, which are kept as numbers"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        return (LayerOp(LOCAL_LINEAR_ATTENTION, {}, sizes(config)),)

    def made(self, base: nn.Module, config: Any, index: int) -> LocalLinearAttention:
        return class_for(base, MODULES, "local linear attention")(base, head_size(config))


MIXERS = (LocalLinearAttentionMixer(),)
