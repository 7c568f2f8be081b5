"""Of flash-linear-attention gated linear attention (GLA, RetNet, HGRN, HGRN2), the delta rule (DeltaNet) and the gated delta rule
(Gated DeltaNet), with softmax in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from still_export.errors import ConfigError
from still_export.mixers.config import LayersConfig
from still_export.mixers.layers import FULL, MOST_ROWS, WINDOWED
from still_export.models.families.fla import (
    KINDS,
    FlaConfig,
    FlaDeltaNet,
    FlaGatedDeltaNet,
    FlaGLA,
    FlaHGRN,
    FlaHGRN2,
    FlaKind,
    FlaRetNet,
    fla_stack,
)
from still_export.models.families.fla_config import (
    LINEAR,
    delta_net_heads,
    gated_delta_net_heads,
    gla_heads,
    hgrn2_heads,
    hgrn_heads,
    retnet_heads,
    values,
)
from still_export.models.families.linear_mixins import LinearConfigMixin, LinearModelMixin, Place, stack_family
from still_export.models.families.softmax_families import Family, Published


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


def fla_family(kind: FlaKind, module: str = __name__) -> Family:
    KINDS[kind.name] = kind
    mixers = {LINEAR: kind.mixer, FULL: FULL, **{name: mixer for name, (mixer, _) in kind.further.items()}}
    return stack_family(
        module,
        FlaConfig,
        fla_stack,
        (FlaConfigMixin, LinearModelMixin),
        title=kind.title,
        name=kind.name,
        fields=kind.fields,
        published=Published(values, (*NAMES, *kind.names)),
        places={name: Place(mixer, ("attn",)) for name, mixer in mixers.items()},
    )


NAMES = (
    ("model.embeddings.", "model.embed_tokens."),
    (".attn.g_norm_swish_gate.", ".attn.o_norm."),
)
_NORM = ((".attn.g_norm.", ".attn.o_norm."),)


def _convolved(config: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {"use_short_conv": (True,)}


def _retnet(config: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Of softmax layers, whose heads are turned otherwise, and of heads that share keys there is no checkpoint."""
    return {"attn": (None,), "num_kv_heads": (None, config.get("num_heads"))}


FAMILIES: tuple[Family, ...] = tuple(
    fla_family(kind)
    for kind in (
        FlaKind(
            "gla",
            "GLA",
            "gated_linear_attention",  # the gated rule with a decay per key channel
            FlaGLA,
            gla_heads,
            {"num_heads": 4, "expand_k": 0.5, "expand_v": 1.0, "use_short_conv": False, "use_output_gate": True},
            names=_NORM,
        ),
        FlaKind(
            "hgrn2",
            "HGRN2",
            "gated_linear_attention",  # the same, what is written follows from what is forgotten
            FlaHGRN2,
            hgrn2_heads,
            {"expand_ratio": 128, "use_short_conv": False, "use_lower_bound": True},
        ),
        FlaKind(
            "hgrn",
            "HGRN",
            "gated_linear_attention",  # the same in each channel by itself
            FlaHGRN,
            hgrn_heads,
            {"expand_ratio": 1, "use_short_conv": False, "use_lower_bound": True},
        ),
        FlaKind(
            "retnet",
            "RetNet",
            "gated_linear_attention",  # a decay of each head for all tokens
            FlaRetNet,
            retnet_heads,
            {
                "num_heads": 8,
                "expand_k": 1.0,
                "expand_v": 2.0,
                "hidden_ratio": 2,
                "use_short_conv": False,
                "use_output_gate": True,
            },
            _retnet,
            _NORM,
            turned=True,
        ),
        FlaKind(
            "delta_net",
            "DeltaNet",
            "delta_net",
            FlaDeltaNet,
            delta_net_heads,
            {"num_heads": 16, "expand_k": 1.0, "expand_v": 1.0, "use_short_conv": True, "use_gate": False},
            _convolved,
        ),
        FlaKind(
            "gated_deltanet",
            "GatedDeltaNet",
            "gated_delta_net",
            FlaGatedDeltaNet,
            gated_delta_net_heads,
            {"head_dim": 256, "num_heads": 6, "expand_v": 2.0, "use_short_conv": True, "use_gate": True},
            _convolved,
        ),
    )
)
