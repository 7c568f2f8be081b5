"""Latent attention, replacing a family's module, over the op still::Attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.attention.mixer import KeysMixer, attributes
from still_export.mixers.attention.module import SoftmaxAttention
from still_export.mixers.attention.variants import rotated
from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import class_for
from still_export.mixers.roles import FEATURE_MAP, GATE, PROJECTION
from still_kernels.attention.spec import ATTENTION


class LatentAttention(SoftmaxAttention):
    """Attention to one cached latent per token; keys and values are its projections.

    A head's key is (K c, r) and its value V c, with c the latent and r a part that heads share. Because q (K c) = (K^T q) c, queries are
    projected to the space of latents, and all heads attend to (c, r) as one shared key and value. The result is projected to values. The
    bytes read per token do not depend on the number of heads, and no key or value is expanded.
    """

    weight_roles: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("q_proj.weight", "q_a_proj.weight", "q_b_proj.weight", "o_proj.weight"), PROJECTION),
        "kv_a_proj_with_mqa.weight": PROJECTION,
        "kv_b_proj.weight": FEATURE_MAP,  # a matrix per head on either side of the op, not a linear layer over all of a layer's inputs
    }

    def __init__(self, base: Any) -> None:
        nn.Module.__init__(self)
        self.layer_idx: int = base.layer_idx
        for name, child in base.named_children():
            self.add_module(name, child)
        self.low_rank = hasattr(base, "q_a_proj") and base.q_a_proj is not None
        self.rank, self.shared = base.kv_lora_rank, base.qk_rope_head_dim
        self.key_size, self.value_size = base.qk_nope_head_dim, base.v_head_dim
        self.head_dim = self.rank + self.shared
        # The op divides by the root of its own head size.
        self.factor = float(base.scaling) * self.head_dim**0.5

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        wide = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden))) if self.low_rank else self.q_proj(hidden)
        query, own = wide.unflatten(-1, (-1, self.key_size + self.shared)).split((self.key_size, self.shared), dim=-1)
        latent, shared = self.kv_a_proj_with_mqa(hidden).split((self.rank, self.shared), dim=-1)
        own, shared = self.turn(own, shared, position_embeddings)
        key = torch.cat([self.kv_a_layernorm(latent), shared], dim=-1)[:, :, None]
        up = self.kv_b_proj.weight.unflatten(0, (-1, self.key_size + self.value_size))  # [H, key and value, rank]
        of_key, of_value = up.split((self.key_size, self.value_size), dim=1)
        query = torch.cat([_by_head(query, of_key), own], dim=-1)
        found = self.attend(self.factor * query, key, key, past_key_values)[..., : self.rank]
        return self.o_proj(self.gated(_by_head(found, of_value.transpose(1, 2)), hidden).flatten(2))

    def turn(
        self, own: Tensor, shared: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Position-dependent parts of queries [B, T, H, R] and keys [B, T, R]; unchanged here."""
        return own, shared

    def gated(self, values: Tensor, hidden: Tensor) -> Tensor:
        """Input of the output projection, from the heads' values [B, T, H, V]."""
        return values


class RotatedLatentAttention(LatentAttention):
    """With rotary positions on pairs of neighbouring channels."""

    def turn(
        self, own: Tensor, shared: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        # Pairs lie in halves from here on, in queries and keys alike.
        own, shared = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (own, shared))
        own, shared = rotated(own, shared[:, :, None], position_embeddings)
        return own, shared[:, :, 0]


class BailingLatentAttention(RotatedLatentAttention):
    """Ling: also a gate for each head."""

    weight_roles: ClassVar[dict[str, str]] = {**LatentAttention.weight_roles, "g_proj.weight": GATE}

    def gated(self, values: Tensor, hidden: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return values * self.g_proj(hidden).to(wide).sigmoid().to(hidden.dtype)[..., None]


MODULES: dict[str, type[LatentAttention]] = {
    "KimiLinearAttention": LatentAttention,
    "BailingHybridAttention": BailingLatentAttention,
    "ZebraAttention": RotatedLatentAttention,
}


def _by_head(values: Tensor, weight: Tensor) -> Tensor:
    """Values [B, T, H, K] times a matrix per head [H, K, N]: [B, T, H, N]."""
    return (values.transpose(1, 2) @ weight).transpose(1, 2)


class LatentAttentionMixer(KeysMixer):
    """Layers of type "latent_attention". The op has one key head, as wide as the latent and the shared part of the keys."""

    name = "latent_attention"
    of_families = True

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        sizes = {"H": config.num_attention_heads, "HK": 1, "D": _width(config)}
        return (LayerOp(ATTENTION, attributes(config), sizes),)

    def cache_layer(self, config: Any, index: int) -> AttentionLayer:
        return AttentionLayer(1, _width(config), config.still.deployment.cache)

    def made(self, base: nn.Module, config: Any, index: int) -> LatentAttention:
        return class_for(base, MODULES, "latent attention")(base)


def _width(config: Any) -> int:
    return int(config.kv_lora_rank + config.qk_rope_head_dim)
