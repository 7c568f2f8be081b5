"""Settings of layers of type "hybrid_attention" in a model's configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from still_export.mixers.layers import MOST_ROWS, Deployment, check_range, head_size
from still_graphs.errors import ConfigError
from still_kernels.hybrid_attention.config import HybridAttentionConfig, HybridAttentionSettings

MIX_EPSILON = 1e-9
"""Default of a model's layers. The specification's 1e-6 (the released code's) shifts SmolLM2-135M's logits within two chunks by 1.6e-4
over its 30 layers, 1e-9 by 6e-5, which is the noise of float32. Nothing needs more: a row's own logit keeps the denominator above 1."""


@dataclass(frozen=True, kw_only=True)
class HybridSettings(HybridAttentionSettings):
    """The settings of the kernels, and

    Args:
        gate_bias: The gate projection has a bias, which opens fresh gates; released checkpoints have none.
        shared_feature_map: One feature projection for all heads instead of one per query head.
        salient_by_layer: `salient_per_chunk` of each layer (unused for other types), or None.
        window_factors: For each layer and query head, a weight of the softmax terms (LoLCATs), or None.
    """

    shared_feature_map: bool = False
    gate_bias: bool = True
    salient_by_layer: tuple[int, ...] | None = None
    window_factors: tuple[tuple[float, ...], ...] | None = None
    mix_epsilon: float = MIX_EPSILON

    def __post_init__(self) -> None:
        for name in ("chunk_size", "feature_dim"):
            if (value := getattr(self, name)) is not None:
                check_range(name, value, MOST_ROWS)
        if self.window_factors is not None:
            object.__setattr__(
                self, "window_factors", tuple(tuple(float(x) for x in row) for row in self.window_factors)
            )
        if self.salient_by_layer is not None:
            object.__setattr__(self, "salient_by_layer", tuple(self.salient_by_layer))
        # The layer's own class checks the settings, which do not depend on the geometry.
        for salient in {self.salient_per_chunk, *(self.salient_by_layer or ())}:
            self._layer(num_heads=1, num_kv_heads=1, head_dim=4, salient_per_chunk=salient)

    def _layer(self, **options: Any) -> HybridAttentionConfig:
        return HybridAttentionConfig(
            **{f.name: getattr(self, f.name) for f in fields(HybridAttentionSettings)} | options
        )

    def layer_config(self, family: Any, layer: int, deployment: Deployment) -> HybridAttentionConfig:
        """The attention of layer `layer` of a model with the family configuration `family`.

        Raises:
            ConfigError: window_factors or salient_by_layer do not fit the family's layers or heads.
        """
        layers, factors, salient = family.num_hidden_layers, self.window_factors, self.salient_by_layer
        for name, rows in {"window_factors": factors, "salient_by_layer": salient}.items():
            if rows is not None and len(rows) != layers:
                raise ConfigError(f"{name} has {len(rows)} entries for num_hidden_layers={layers}.")
        return self._layer(
            salient_per_chunk=self.salient_per_chunk if salient is None else salient[layer],
            num_heads=family.num_attention_heads,
            num_kv_heads=family.num_key_value_heads,
            head_dim=head_size(family),
            window_factor=None if factors is None else factors[layer],
            capacity_tokens=deployment.capacity(family),
            overflow=deployment.overflow,
            cache=deployment.cache,
        )
