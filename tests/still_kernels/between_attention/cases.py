"""Holds the kernel of still::BetweenAttention to float64, on a GPU: interpreters have no CUDA C++."""

from __future__ import annotations

import torch

from tests.between_attention_cases import CASES, call, exact
from tests.still_kernels.stateless_cases import launched, worst_error


def run_case(name: str, dtype: torch.dtype) -> float:
    """Greatest relative error of the outputs, by Frobenius norm. Outputs start as NaN, a write outside is an error."""
    from still_kernels.between_attention import OP

    given = call(CASES[name], dtype=dtype)
    expected = exact(given)
    return worst_error(launched(OP.launch, given, expected, None, "cuda"), expected)
