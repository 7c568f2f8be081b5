"""StillConfig: what a STILL model stores beside its family's configuration."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from still_export.fields import check_types
from still_graphs.errors import ConfigError
from still_kernels.hybrid_attention import HybridAttentionConfig
from still_kernels.hybrid_attention.config import HybridAttentionSettings

HYBRID = "hybrid_attention"
FULL = "full_attention"
WINDOWED = "windowed_attention"
"""Names of layers; still_export.mixers.registry has all."""
MOST_ROWS, MOST_TOKENS = 1 << 16, 1 << 40
"""What no model has: beyond, a damaged number takes the machine's memory before a check of shapes can name it."""

DEPLOYMENT = ("capacity_tokens", "overflow", "cache")
"""Fields of StillConfig that no training fixes."""

MIX_EPSILON = 1e-9
"""Default of a model's layers. The specification's 1e-6 (the released code's) shifts SmolLM2-135M's logits within two chunks by 1.6e-4
over its 30 layers, 1e-9 by 6e-5, which is the noise of float32. Nothing needs more: a row's own logit keeps the denominator above 1."""


@dataclass(frozen=True, kw_only=True)
class StillConfig(HybridAttentionSettings):
    """The STILL part of a model's configuration, `still_config` in its config.json.

    Args:
        layer_types: Per layer "hybrid_attention", "full_attention" or another mixer; None = all hybrid. It lives here and not in the
            family's own `layer_types`, whose names transformers checks and whose masks it derives.
        capacity_tokens: T_max of the salient cache; None = the family's max_position_embeddings.
        gate_bias: The gate projection has a bias (fresh gates are opened by it; released checkpoints have none).
        shared_feature_map: One feature projection for all heads instead of one per query head.
        window_factors: Per layer, one scalar per query head on the softmax terms (LoLCATs), or None.

    The other fields are those of `HybridAttentionSettings`.

    Raises:
        ConfigError: A value is unknown, out of range, or contradicts another.
    """

    shared_feature_map: bool = False
    gate_bias: bool = True
    window_factors: tuple[tuple[float, ...], ...] | None = None
    mix_epsilon: float = MIX_EPSILON
    capacity_tokens: int | None = None
    layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, most in (("chunk_size", MOST_ROWS), ("feature_dim", MOST_ROWS), ("capacity_tokens", MOST_TOKENS)):
            value = getattr(self, name)
            if value is not None and value > most:
                raise ConfigError(f"{name}={value} is more than {most}.")
        if self.layer_types is not None:
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
            from still_export.mixers.registry import MIXERS  # which imports this module

            for index, name in enumerate(self.layer_types):
                if name not in MIXERS:
                    near = difflib.get_close_matches(str(name), MIXERS, 1)
                    hint = f" Did you mean {near[0]!r}?" if near else ""
                    raise ConfigError(f"layer_types[{index}]={name!r} is unknown; known: {', '.join(MIXERS)}.{hint}")
        if self.window_factors is not None:
            object.__setattr__(
                self, "window_factors", tuple(tuple(float(x) for x in row) for row in self.window_factors)
            )
        # The layer's own class holds the rules; the geometry does not matter to them.
        heads = 1 if self.window_factors is None else max((len(row) for row in self.window_factors), default=1)
        self._layer(
            num_heads=heads, num_kv_heads=1, head_dim=4, capacity_tokens=self.capacity_tokens or 1, factors=None
        )

    def _layer(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        capacity_tokens: int,
        factors: tuple[float, ...] | None,
    ) -> HybridAttentionConfig:
        return HybridAttentionConfig(
            num_heads,
            num_kv_heads,
            head_dim,
            window_factor=factors,
            capacity_tokens=capacity_tokens,
            **{f.name: getattr(self, f.name) for f in fields(HybridAttentionSettings)},
        )

    def layer_type(self, layer: int) -> str:
        """The mixer of layer `layer`, by name."""
        return HYBRID if self.layer_types is None else self.layer_types[layer]

    def layer_config(self, family: Any, layer: int) -> HybridAttentionConfig:
        """The attention of layer `layer` of a model with the family configuration `family`.

        Raises:
            ConfigError: layer_types or window_factors do not fit the family's layers or heads.
        """
        layers, heads = family.num_hidden_layers, family.num_attention_heads
        for name in ("layer_types", "window_factors"):
            value = getattr(self, name)
            if value is not None and len(value) != layers:
                raise ConfigError(f"{name} has {len(value)} entries for num_hidden_layers={layers}.")
        return self._layer(
            num_heads=heads,
            num_kv_heads=family.num_key_value_heads,
            head_dim=head_size(family),
            capacity_tokens=self.capacity(family),
            factors=None if self.window_factors is None else self.window_factors[layer],
        )

    @property
    def bounded(self) -> bool:
        """More tokens than the capacity are refused; otherwise the salient cache folds."""
        return self.overflow == "error"

    def capacity(self, family: Any) -> int:
        """T_max for a model with the family configuration `family`."""
        return self.capacity_tokens or int(family.max_position_embeddings)

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can hold, every field, defaults included."""
        values = asdict(self)
        for name in ("layer_types", "window_factors"):
            if values[name] is not None:
                values[name] = [list(x) if isinstance(x, tuple) else x for x in values[name]]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "still_config") -> StillConfig:
        """The configuration that `to_dict` wrote, in `source`; missing fields take their defaults.

        Raises:
            ConfigError: An unknown field, with the nearest known one, or a bad value.
        """
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(known)}."
                raise ConfigError(f"{source} has the unknown field {name!r}.{hint}")
        check_types(cls, values, source, ConfigError)
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error


def head_size(family: Any) -> int:
    """D of a family configuration; several leave `head_dim` unset."""
    return int(getattr(family, "head_dim", None) or family.hidden_size // family.num_attention_heads)
