"""Causal softmax attention with a cache: definition, PyTorch form, kernels."""

from typing import TYPE_CHECKING

from still_kernels.op_kernels import offers

if TYPE_CHECKING:
    from still_kernels.attention.blocked import blocked_attention
    from still_kernels.attention.inputs import Inputs
    from still_kernels.attention.naive import naive_attention
    from still_kernels.attention.state import AttentionState

__all__ = ["AttentionState", "Inputs", "blocked_attention", "naive_attention"]

__getattr__ = offers(__name__, "blocked", "inputs", "naive", "state")
