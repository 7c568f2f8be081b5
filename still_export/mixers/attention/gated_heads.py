"""What LFM3's attention has beside others', with a window or without."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from still_export.mixers.projections import ProjectedAttention, rotated
from still_export.mixers.roles import GATE, PROJECTION


class GatedHeads(ProjectedAttention):
    """Positions in float32, and a gate for each head, which the layer's input makes, where the model has gates."""

    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys(ProjectedAttention.weight_roles, PROJECTION),
        "g_proj.weight": GATE,
    }

    def __init__(self, base: Any, *arguments: Any) -> None:
        super().__init__(base, *arguments)
        self.g_proj: nn.Module | None = base.g_proj

    def turned(
        self, query: Tensor, key: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        return rotated(query, key, position_embeddings)

    def project_out(self, output: Tensor, hidden: Tensor) -> Tensor:
        gated = output if self.g_proj is None else output * self.g_proj(hidden).sigmoid()[..., None]
        return super().project_out(gated, hidden)
