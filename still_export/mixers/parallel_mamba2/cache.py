"""What a cache holds of a layer whose softmax attention has states of fixed size beside it."""

from __future__ import annotations

from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.fixed import BesideFixedStates
from still_kernels.attention import AttentionState


class AttentionAndFixedStates(BesideFixedStates[AttentionState], AttentionLayer):
    """Keys and values, and beside them the states of the other ops."""
