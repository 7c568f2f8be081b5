"""The traced form of experts: the torch op `still::experts`."""

from __future__ import annotations

from torch import Tensor

from still_kernels.experts.meaning import Inputs, naive_experts
from still_kernels.experts.spec import EXPERTS
from still_kernels.torch_ops import op_without_state


def _experts(inputs: Inputs) -> tuple[Tensor]:
    return (naive_experts(inputs),)


experts = op_without_state(EXPERTS, Inputs, _experts)
"""Of tokens [B, T, I], experts and weights: output [B, T, I], alone in a tuple."""
