"""The mixers by the name that `layer_types` has for them. One line an op; no generic room names one."""

from __future__ import annotations

from typing import Any

from still_export.mixers.attention.mixer import AttentionMixer
from still_export.mixers.base import Mixer
from still_export.mixers.hybrid_attention.mixer import HybridAttentionMixer

MIXERS: dict[str, Mixer] = {mixer.name: mixer for mixer in (HybridAttentionMixer(), AttentionMixer())}


def mixer_of(config: Any, index: int) -> Mixer:
    """The mixer of layer `index` of a model with the STILL family configuration `config`."""
    return MIXERS[config.still.layer_type(index)]
