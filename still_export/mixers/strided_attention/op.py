"""The traced form: the torch op `still::strided_attention`."""

from __future__ import annotations

from still_export.mixers.attention.keyed import op_of_keys
from still_graphs.ops.strided_attention import STRIDED_ATTENTION
from still_kernels.strided_attention import Inputs
from still_kernels.strided_attention import strided_attention as kernel

strided_attention = op_of_keys(STRIDED_ATTENTION, Inputs, kernel)
"""Of inputs, state and whether to write into it: output [B, T, H, D] and the state after the call."""
