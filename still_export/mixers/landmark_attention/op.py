"""The traced form: the torch op `still::landmark_attention`."""

from __future__ import annotations

from still_export.mixers.attention.keyed import op_of_keys
from still_graphs.ops.landmark_attention import LANDMARK_ATTENTION
from still_kernels.landmark_attention import Inputs
from still_kernels.landmark_attention import landmark_attention as kernel

landmark_attention = op_of_keys(LANDMARK_ATTENTION, Inputs, kernel)
"""Of inputs, state and whether to write into it: output [B, T, H, D] and the state after the call."""
