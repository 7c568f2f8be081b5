"""STILL's hybrid attention: reference, stateful form, kernels."""

from typing import TYPE_CHECKING

from still_kernels.op_kernels import offers

if TYPE_CHECKING:
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

__getattr__ = offers(__name__, "config", "inputs", "reference.chunked", "reference.naive", "state")
