"""The traced form: the torch op `still::angle_sum`."""

from __future__ import annotations

from still_kernels.angle_sum.meaning import Inputs, naive_angle_sum
from still_kernels.angle_sum.spec import ANGLE_SUM
from still_kernels.torch_ops import op_of_one_state

angle_sum = op_of_one_state(ANGLE_SUM, Inputs, naive_angle_sum)
"""Of inputs and the state: angles [B, T, H, A], and the state after the call."""
