"""WindowedAttention: softmax attention to the latest tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from still_export.mixers.attention.variants import GatedHeads
from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.hybrid_attention.cache import HybridLayer
from still_export.mixers.hybrid_attention.window import WindowModule, window_of
from still_export.mixers.layers import WINDOWED
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION


class WindowedAttention(WindowModule):
    """Softmax over a window with the projections, and the norms of queries and keys, of the module that it replaces."""

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        query, key, value = self.project_heads(hidden, position_embeddings)
        return self.project_out(self.windowed(query, key, value, past_key_values), hidden)


class GatedWindow(GatedHeads, WindowedAttention):
    """LFM3's windowed attention."""


def window_for(base: Any) -> type[WindowedAttention]:
    return GatedWindow if type(base).__name__ == "Lfm3Attention" else WindowedAttention


class WindowedAttentionMixer(Mixer):
    """Layers of type "windowed_attention"; the window is the family's `sliding_window`."""

    name = WINDOWED
    of_families = True

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        window = window_of(config, config.sliding_window)
        return (LayerOp(HYBRID_ATTENTION, window.attributes(), window.symbols()),)

    def cache_layer(self, config: Any, index: int) -> HybridLayer:
        return HybridLayer(window_of(config, config.sliding_window))

    def module(self, base: nn.Module, config: Any, index: int) -> WindowedAttention:
        return window_for(base)(base, window_of(config, config.sliding_window))
