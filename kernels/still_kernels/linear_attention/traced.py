"""The traced form of linear attention: the torch op `still::linear_attention`."""

from __future__ import annotations

from still_kernels.linear_attention.call import linear_attention as kernel
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.spec import LINEAR_ATTENTION
from still_kernels.torch_ops import op_of_one_state

linear_attention = op_of_one_state(LINEAR_ATTENTION, Inputs, kernel)
"""Of inputs with `new_tokens` and a state [B, H, D, V], float32 (float64 for float64 inputs): output [B, T, H, G, V] and the state after
the call."""
