"""STILL's hybrid attention: reference, stateful form, kernels."""

from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.inputs import Inputs
from still_kernels.hybrid_attention.reference.chunked import chunked_hybrid_attention
from still_kernels.hybrid_attention.reference.naive import naive_hybrid_attention
from still_kernels.hybrid_attention.state import HybridAttentionState

__all__ = [
    "HybridAttentionConfig",
    "HybridAttentionState",
    "Inputs",
    "chunked_hybrid_attention",
    "naive_hybrid_attention",
]
