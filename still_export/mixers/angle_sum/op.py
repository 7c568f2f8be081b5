"""The traced form: the torch op `still::angle_sum`."""

from __future__ import annotations

from still_export.mixers.torch_ops import op_of_one_state
from still_graphs.ops.angle_sum import ANGLE_SUM
from still_kernels.angle_sum import Inputs, naive_angle_sum

angle_sum = op_of_one_state(ANGLE_SUM, Inputs, naive_angle_sum)
"""Of inputs and the state: angles [B, T, H, A], and the state after the call."""
