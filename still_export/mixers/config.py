"""The STILL part of a model's configuration, `still_config` in config.json: flat in the file, grouped by owner here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from still_export.mixers.block_attention.settings import BlockSettings
from still_export.mixers.hybrid_attention.settings import HybridSettings
from still_export.mixers.layers import HYBRID, Deployment
from still_export.mixers.registry import MIXERS
from still_export.options import check_types
from still_graphs.errors import ConfigError, unknown

DEPLOYMENT = tuple(f.name for f in fields(Deployment))
"""Fields that training does not fix."""


@dataclass(frozen=True, kw_only=True)
class LayersConfig:
    """The configuration of a model with layers that its family's configuration describes.

    Args:
        layer_types: Per layer the name of its mixer; None = all "hybrid_attention". Separate from the family's own
            `layer_types`, because transformers checks those names and derives masks from them.
        deployment: Choices for running the model.
    """

    layer_types: tuple[str, ...] | None = None
    deployment: Deployment = field(default_factory=Deployment)

    def __post_init__(self) -> None:
        if self.layer_types is not None:
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
        for index, name in enumerate(self.layer_types or ()):
            if name not in MIXERS:
                raise unknown(name, MIXERS, f"layer_types[{index}]={name!r}")

    def layer_type(self, layer: int) -> str:
        return HYBRID if self.layer_types is None else self.layer_types[layer]

    def check_layers(self, layers: int) -> None:
        """Raise ConfigError unless layer_types name the mixers of so many layers."""
        if self.layer_types is not None and len(self.layer_types) != layers:
            raise ConfigError(f"layer_types has {len(self.layer_types)} entries for num_hidden_layers={layers}.")

    def to_dict(self) -> dict[str, Any]:
        """JSON values, including defaults."""
        types = None if self.layer_types is None else list(self.layer_types)
        deployment = asdict(self.deployment)
        if not self.deployment.whole_prompts:
            del deployment["whole_prompts"]  # as before this choice existed
        return {"layer_types": types, **deployment}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "still_config") -> Self:
        """The configuration that `to_dict` wrote into `source`; missing fields have their defaults.

        Raises:
            ConfigError: An unknown field, with the nearest known one, or a bad value.
        """
        own = [f.name for f in fields(cls) if f.name != "deployment"]
        known = [*own, *DEPLOYMENT]
        for name in values:
            if name not in known:
                raise unknown(name, known, f"{source}: the field {name!r}")
        for kind in (cls, Deployment):
            check_types(kind, values, source, ConfigError)
        try:
            deployment = Deployment(**{name: values[name] for name in DEPLOYMENT if name in values})
            return cls(**{name: values[name] for name in own if name in values}, deployment=deployment)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class StillConfig(LayersConfig, HybridSettings, BlockSettings):
    """The configuration of a softmax model whose layers became hybrid, or another mixer's, with the settings of both."""

    def __post_init__(self) -> None:
        LayersConfig.__post_init__(self)
        HybridSettings.__post_init__(self)
        BlockSettings.__post_init__(self)

    def check_layers(self, layers: int) -> None:
        super().check_layers(layers)
        self.check_reuse(self.layer_types or (HYBRID,) * layers)

    def to_dict(self) -> dict[str, Any]:
        """Like LayersConfig, with the settings of the mixers in use."""
        values = {n: getattr(self, n) for kind in self.layer_types or (HYBRID,) for n in MIXERS[kind].settings}
        if (factors := values.get("window_factors")) is not None:
            values["window_factors"] = [list(row) for row in factors]
        if values.get("salient_by_layer", ()) is None:
            del values["salient_by_layer"]  # as before this choice existed
        elif "salient_by_layer" in values:
            values["salient_by_layer"] = list(values["salient_by_layer"])
        if "reuse" in values:
            values["reuse"] = None if self.reuse is None else list(self.reuse)
        return {**values, **super().to_dict()}
