"""The families of flash-linear-attention: GLA, RetNet, HGRN and HGRN2, DeltaNet, Gated DeltaNet, Parallax; local linear attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from still_export.errors import ConfigError
from still_export.mixers.config import LayersConfig
from still_export.mixers.layers import FULL, MOST_ROWS, WINDOWED
from still_export.models.families.fla import NATS, ROUTED, FlaConfig, fla_stack
from still_export.models.families.fla_config import LINEAR
from still_export.models.families.linear_mixins import LinearConfigMixin, LinearModelMixin, Place
from still_export.models.families.softmax_families import Family, make_family
from still_export.models.families.stack import Stack, StackForCausalLM


class FlaConfigMixin(LinearConfigMixin):
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


class FlaModelMixin(LinearModelMixin):
    """On the stack of layers that they share."""

    def stack(self, config: Any) -> Stack:
        return fla_stack(config)


def _family(name: str, title: str, mixer: str) -> Family:
    places = {LINEAR: Place(mixer, ("attn",)), FULL: Place(FULL, ("attn",))}
    if name == NATS:
        places[ROUTED] = Place("routed_attention", ("attn",))
    mixins = (FlaConfigMixin, FlaModelMixin)
    return make_family(
        __name__, FlaConfig, StackForCausalLM, mixins, title=title, name=name, linear=True, places=places
    )


FLA_FAMILIES: tuple[Family, ...] = (
    _family("gla", "GLA", "gated_linear_attention"),  # the gated rule with a decay per key channel
    _family("hgrn2", "HGRN2", "gated_linear_attention"),  # the same, what is written follows from what is forgotten
    _family("hgrn", "HGRN", "gated_linear_attention"),  # the same in each channel by itself
    _family("retnet", "RetNet", "gated_linear_attention"),  # a decay of each head for all tokens
    _family("delta_net", "DeltaNet", "delta_net"),
    _family("gated_deltanet", "GatedDeltaNet", "gated_delta_net"),
    _family(NATS, "NatsLinear", "gated_delta_net"),  # and NAtS-L's layers, whose chunks go to softmax or to the rule
    _family("parallax", "Parallax", "local_linear_attention"),
    _family(
        "local_linear", "LocalLinear", "local_linear_attention"
    ),  # Parallax' folder, with `ridge` in the place of a projection
)
"""By flash-linear-attention's model_type."""
