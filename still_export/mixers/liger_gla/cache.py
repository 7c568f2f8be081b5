"""What a cache holds of a Liger-GLA layer."""

from __future__ import annotations

from still_export.mixers.fixed import BesideFixedStates
from still_export.mixers.hybrid_attention.cache import HybridLayer
from still_kernels.hybrid_attention import HybridAttentionState


class WindowAndFixedStates(BesideFixedStates[HybridAttentionState], HybridLayer):
    """The window's keys and values, and beside them the state of GLA."""
