"""WindowedAttention: the attention of a layer that sees the latest tokens alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from still_export.mixers.hybrid_attention.window import WindowModule


class WindowedAttention(WindowModule):
    """Softmax over a window with the projections, and the norms of queries and keys, of the module that it replaces."""

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        query, key, value = self.project_heads(hidden, position_embeddings)
        return self.o_proj(self.windowed(query, key, value, past_key_values).flatten(2))
