"""The traced form: the torch op `still::local_linear_attention`."""

from __future__ import annotations

from still_export.mixers.attention.keyed import op_of_keys
from still_graphs.ops.local_linear_attention import LOCAL_LINEAR_ATTENTION
from still_kernels.local_linear_attention import Inputs
from still_kernels.local_linear_attention import local_linear_attention as kernel

local_linear_attention = op_of_keys(LOCAL_LINEAR_ATTENTION, Inputs, kernel)
"""Of inputs, state and whether to write into it: output [B, T, H, D] and the state after the call."""
