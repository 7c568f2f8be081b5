"""The families of flash-linear-attention: GLA, DeltaNet, Gated DeltaNet, HGRN2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from still_export.errors import ConfigError
from still_export.mixers.config import LayersConfig
from still_export.mixers.layers import FULL, MOST_ROWS, WINDOWED
from still_export.models.families import Family
from still_export.models.fla import FlaConfig, fla_stack
from still_export.models.fla_config import LINEAR
from still_export.models.linear_mixins import LinearConfigMixin, LinearModelMixin, Place
from still_export.models.stack import Stack, StackForCausalLM


class StillFlaConfig(LinearConfigMixin):
    """Softmax layers have a window where it is shorter than what they may see."""

    sliding_window: int | None

    def read_still(self) -> LayersConfig:
        still = super().read_still()
        window = self.sliding_window
        if window is None or (window >= still.deployment.capacity(self) and still.deployment.bounded):
            return still
        if not 1 <= window <= MOST_ROWS:
            raise ConfigError(f"attn.window_size={window} in config.json is outside 1..{MOST_ROWS}. Fix it.")
        return replace(still, layer_types=tuple(WINDOWED if name == FULL else name for name in still.layer_types or ()))


def _places(mixer: str) -> dict[str, Place]:
    return {LINEAR: Place(mixer, ("attn",)), FULL: Place(FULL, ("attn",))}


@strict
class StillGLAConfig(StillFlaConfig, FlaConfig):
    """GLA: the gated rule with a decay per key channel."""

    model_type = "still_gla"
    places: ClassVar[dict[str, Place]] = _places("gated_linear_attention")
    still_config: dict[str, Any] | None = None


@strict
class StillHGRN2Config(StillFlaConfig, FlaConfig):
    """HGRN2: the same, what is written follows from what is forgotten."""

    model_type = "still_hgrn2"
    places: ClassVar[dict[str, Place]] = _places("gated_linear_attention")
    still_config: dict[str, Any] | None = None


@strict
class StillDeltaNetConfig(StillFlaConfig, FlaConfig):
    """DeltaNet: the delta rule."""

    model_type = "still_delta_net"
    places: ClassVar[dict[str, Place]] = _places("delta_net")
    still_config: dict[str, Any] | None = None


@strict
class StillGatedDeltaNetConfig(StillFlaConfig, FlaConfig):
    """Gated DeltaNet: the gated delta rule."""

    model_type = "still_gated_deltanet"
    places: ClassVar[dict[str, Place]] = _places("gated_delta_net")
    still_config: dict[str, Any] | None = None


class StillFlaForCausalLM(LinearModelMixin, StackForCausalLM):
    """A model of flash-linear-attention."""

    def stack(self, config: Any) -> Stack:
        return fla_stack(config)


class StillGLAForCausalLM(StillFlaForCausalLM):
    """GLA."""

    config_class = StillGLAConfig


class StillHGRN2ForCausalLM(StillFlaForCausalLM):
    """HGRN2."""

    config_class = StillHGRN2Config


class StillDeltaNetForCausalLM(StillFlaForCausalLM):
    """DeltaNet."""

    config_class = StillDeltaNetConfig


class StillGatedDeltaNetForCausalLM(StillFlaForCausalLM):
    """Gated DeltaNet."""

    config_class = StillGatedDeltaNetConfig


FLA_FAMILIES: tuple[Family, ...] = (
    Family("gla", FlaConfig, StillGLAConfig, StillGLAForCausalLM, linear=True),
    Family("hgrn2", FlaConfig, StillHGRN2Config, StillHGRN2ForCausalLM, linear=True),
    Family("delta_net", FlaConfig, StillDeltaNetConfig, StillDeltaNetForCausalLM, linear=True),
    Family("gated_deltanet", FlaConfig, StillGatedDeltaNetConfig, StillGatedDeltaNetForCausalLM, linear=True),
)
"""By flash-linear-attention's model_type."""
