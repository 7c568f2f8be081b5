"""WindowedAttention: the attention of a layer that sees the latest tokens alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from still_export.mixers.attention.gated_heads import GatedHeads
from still_export.mixers.hybrid_attention.window import WindowModule


class WindowedAttention(WindowModule):
    """Softmax over a window with the projections, and the norms of queries and keys, of the module that it replaces."""

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        query, key, value = self.project_heads(hidden, position_embeddings)
        return self.project_out(self.windowed(query, key, value, past_key_values), hidden)


class GatedWindow(GatedHeads, WindowedAttention):
    """The same of LFM3."""


def window_for(base: Any) -> type[WindowedAttention]:
    """The class in the place of `base`."""
    return GatedWindow if type(base).__name__ == "Lfm3Attention" else WindowedAttention
