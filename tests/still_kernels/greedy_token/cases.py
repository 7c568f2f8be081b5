"""Holds the kernel of still::GreedyToken to NumPy's choice; as a program ([NAME ...]): in Triton's interpreter, prints how many differ.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

import numpy as np
import torch

from still_kernels.greedy_token.plan import Inputs
from tests.still_kernels.stateless_cases import launched, main

CASES = ("plain", "odd", "ties", "zeros", "all alike", "infinite", "last", "nan", "nan of the other sign", "overflow")


def call(name: str, dtype: torch.dtype = torch.float16) -> Inputs:
    """Logits [2, 3, V] of a kind; V ends inside of a block."""
    random = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(2, 3, 77 if name == "odd" else 200, generator=random)
    if name == "ties":  # on both sides of a block's border
        logits[..., 63] = logits[..., 64] = logits[..., 130] = 40.0
    elif name == "zeros":  # of both signs are equal
        logits = -logits.abs() - 1
        logits[..., 70], logits[..., 71] = -0.0, 0.0
    elif name == "all alike":
        logits[:] = -3.0
    elif name == "infinite":
        logits[:] = float("-inf")
        logits[0, :, 190] = -60000.0
    elif name == "last":
        logits[..., -1] = 50.0
    elif name.startswith("nan"):
        logits[1, :, 101] = torch.nan if name == "nan" else -torch.tensor(torch.nan)
    elif name == "overflow":
        logits[0, 1:, 150] = torch.inf
    return Inputs(logits.to(dtype))


def exact(given: Inputs) -> torch.Tensor:
    """The first of the largest numbers, int32 [B, T]; -1 where a logit is NaN or the largest is infinite."""
    logits = given.logits.float().numpy()
    sound = np.isfinite(logits.max(-1))  # NaN where a logit is
    return torch.from_numpy(np.where(sound, logits.argmax(-1), -1).astype(np.int32))


def run_case(name: str, device: str = "cpu") -> float:
    """How many tokens differ."""
    from still_kernels.greedy_token.plan import OP, Variant
    from still_kernels.tile import changed

    table = changed(OP.tiles(Variant(), 90), "greedy", {"BC": 64}) if device == "cpu" else None
    given = call(name)
    expected = exact(given)
    (found,) = launched(OP.launch, given, [expected], table, device)
    return float((found.cpu() != expected).sum())


if __name__ == "__main__":
    main(run_case, CASES)
