"""Softmax attention in the softmax layers of linear families."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from still_export.mixers.attention.module import SoftmaxAttention
from still_export.mixers.projections import ProjectedAttention, rotate, rotated
from still_export.mixers.roles import GATE, PROJECTION


class GatedHeads(ProjectedAttention):
    """float32 positions, and optionally a gate for each head, computed from the layer's input."""

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


class GatedAttention(SoftmaxAttention):
    """Qwen3.5 and Qwen3-Next: the query projection also has an output gate for each head."""

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        assert position_embeddings is not None and self.q_norm is not None and self.k_norm is not None
        query, gate = self.q_proj(hidden).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        key, value = (proj(hidden).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        cos, sin = (x[:, :, None] for x in position_embeddings)
        query, key = rotate(self.q_norm(query), cos, sin), rotate(self.k_norm(key), cos, sin)
        output = self.attend(query, key, value, past_key_values) * gate.sigmoid()
        return self.o_proj(output.flatten(2))


class OlmoHybridAttention(SoftmaxAttention):
    """OLMo-Hybrid: norms over all heads at once; positions where the model has them."""

    def project_heads(
        self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.q_norm is not None and self.k_norm is not None
        wide = self.q_norm(self.q_proj(hidden)), self.k_norm(self.k_proj(hidden)), self.v_proj(hidden)
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in wide)
        return *rotated(query, key, position_embeddings), value


class GraniteAttention(SoftmaxAttention):
    """Granite 4 and models without positions: queries are scaled differently; positions are optional."""

    def __init__(self, base: Any, head_dim: int) -> None:
        super().__init__(base, head_dim)
        self.factor = float(base.scaling) * head_dim**0.5

    def project_heads(
        self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            proj(hidden).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return *rotated(self.factor * query, key, position_embeddings), value


class FalconH1Attention(SoftmaxAttention):
    """Falcon-H1: keys are scaled."""

    def __init__(self, base: Any, head_dim: int) -> None:
        super().__init__(base, head_dim)
        self.factor = float(base.key_multiplier)

    def project_heads(
        self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().project_heads(hidden, position_embeddings)
        return query, self.factor * key, value


class Lfm2Attention(SoftmaxAttention):
    """LFM2: other names of projections."""

    weight_roles: ClassVar[dict[str, str]] = dict.fromkeys(
        ("q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight"), PROJECTION
    )

    def __init__(self, base: Any, head_dim: int) -> None:
        nn.Module.__init__(self)
        self.layer_idx, self.head_dim = base.layer_idx, head_dim
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = base.q_proj, base.k_proj, base.v_proj, base.out_proj
        self.q_layernorm, self.k_layernorm = base.q_layernorm, base.k_layernorm

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        query, key, value = (
            proj(hidden).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotated(self.q_layernorm(query), self.k_layernorm(key), position_embeddings)
        return self.out_proj(self.attend(query, key, value, past_key_values).flatten(2))


class Lfm3Attention(GatedHeads, SoftmaxAttention):
    """LFM3: a gate for each head."""


class HypeAttention(SoftmaxAttention):
    """HypeNet: queries with another scale, which may grow with position, and an output gate."""

    weight_roles: ClassVar[dict[str, str]] = {**SoftmaxAttention.weight_roles, "o_gate.weight": GATE}

    def __init__(self, base: Any, head_dim: int) -> None:
        super().__init__(base, head_dim)
        self.factor: float = base.factor
        self.o_gate: nn.Module | None = getattr(base, "o_gate", None)

    def turned(self, query: Tensor, key: Tensor, position_embeddings: Any) -> tuple[Tensor, Tensor]:
        *turn, scale = position_embeddings if len(position_embeddings) > 2 else (*position_embeddings, None)
        query, key = super().turned(query, key, tuple(turn))
        query = query if scale is None else query * scale[:, :, None].to(query.dtype)
        return (query if self.factor == 1.0 else self.factor * query), key

    def project_out(self, output: Tensor, hidden: Tensor) -> Tensor:
        flat = output.flatten(2)
        return self.o_proj(flat if self.o_gate is None else flat * self.o_gate(hidden).sigmoid())


class Zamba2Attention(GraniteAttention):
    """Zamba2: queries, keys and values have adapters."""

    weight_roles: ClassVar[dict[str, str]] = {
        **GraniteAttention.weight_roles,
        **{f"{name}_proj.{part}.weight": PROJECTION for name in "qkv" for part in ("shared", "down", "up")},
    }


_VARIANTS: dict[str, type[SoftmaxAttention]] = {
    "Qwen3_5Attention": GatedAttention,
    "Qwen3_5MoeAttention": GatedAttention,
    "Qwen3NextAttention": GatedAttention,
    "OlmoHybridAttention": OlmoHybridAttention,
    "GraniteMoeHybridAttention": GraniteAttention,
    "NemotronHAttention": GraniteAttention,
    "JambaAttention": GraniteAttention,
    "FalconH1Attention": FalconH1Attention,
    "Lfm2Attention": Lfm2Attention,
    "Lfm2MoeAttention": Lfm2Attention,
    "Lfm3Attention": Lfm3Attention,
    "HypeAttention": HypeAttention,
    "SharedAttention": Zamba2Attention,
}
"""By transformers' class that each replaces; other classes are plain."""


def module_for(base: nn.Module, head_dim: int) -> SoftmaxAttention:
    """The module that replaces `base`, with heads of `head_dim` channels."""
    return _VARIANTS.get(type(base).__name__, SoftmaxAttention)(base, head_dim)
