"""The traced forms of the router and the experts: the torch ops `still::route` and `still::experts`."""

from __future__ import annotations

from torch import Tensor

from still_export.mixers.torch_ops import op_without_state
from still_kernels.experts.meaning import Inputs, naive_experts
from still_kernels.experts.spec import EXPERTS
from still_kernels.route.meaning import Inputs as RouteInputs
from still_kernels.route.meaning import naive_route
from still_kernels.route.spec import ROUTE


def _experts(inputs: Inputs) -> tuple[Tensor]:
    return (naive_experts(inputs),)


route = op_without_state(ROUTE, RouteInputs, naive_route)
"""Of tokens [B, T, I]: experts int32 [B, T, K] and their weights [B, T, K]."""
experts = op_without_state(EXPERTS, Inputs, _experts)
"""Of tokens [B, T, I], experts and weights: output [B, T, I], alone in a tuple."""
