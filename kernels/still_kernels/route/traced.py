"""The traced form of the router: the torch op `still::route`."""

from __future__ import annotations

from still_kernels.route.meaning import Inputs, naive_route
from still_kernels.route.spec import ROUTE
from still_kernels.torch_ops import op_without_state

route = op_without_state(ROUTE, Inputs, naive_route)
"""Of tokens [B, T, I]: experts int32 [B, T, K] and their weights [B, T, K]."""
