"""Layers of type "chosen_heads", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.attention.mixer import AttentionMixer
from still_export.mixers.base import Mixer
from still_export.mixers.chosen_heads.module import ChosenHeads
from still_export.mixers.layers import head_size


class ChosenHeadsMixer(AttentionMixer):
    """Layers of type "chosen_heads"; a family's configuration has `shared_heads` and `routed_heads`."""

    name = "chosen_heads"
    of_families = True

    def paged(self, config: Any, index: int, ranks: int, rank: int) -> None:
        Mixer.paged(self, config, index, ranks, rank)  # refuses: an engine's own attention takes all heads

    def made(self, base: nn.Module, config: Any, index: int) -> ChosenHeads:
        return ChosenHeads(base, head_size(config), config.shared_heads, config.routed_heads)
