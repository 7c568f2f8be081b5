"""Holds the kernels of still::GatedMlp to float64; as a program ([NAME ...]): in Triton's interpreter, prints the errors.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

import json
import sys

import torch

from tests.gated_mlp_cases import CASES, call, exact
from tests.still_kernels.triton_cases import guarded_workspaces

SMALL = {
    **{name: {"BN": 16, "BK": 32} for name in ("few_gated", "few_down")},
    **{name: {"BM": 32, "BN": 16, "BK": 32, "GROUP": 2} for name in ("many_gated", "many_down")},
    "norm": {"BC": 64},
}
"""Blocks so small that these calls have several of each."""


def run_case(name: str, device: str = "cpu") -> float:
    """Greatest relative error of the outputs of all calls, by Frobenius norm. Outputs start as NaN, a write outside is an error."""
    from still_kernels.gated_mlp import Inputs, launch
    from still_kernels.gated_mlp.tiles import tile_table
    from still_kernels.launcher import arch_of
    from still_kernels.tile import changed

    case, worst, table = CASES[name], 0.0, None
    if device == "cpu":
        table = tile_table(0, 0, 0, arch_of(torch.device("cpu")))
        for kernel, setting in SMALL.items():
            table = changed(table, kernel, setting)  # type: ignore[arg-type]
    for batch, count in case.rows:
        given = call(case, batch, count)
        expected = exact(given)
        with guarded_workspaces() as guarded:
            named = {
                n: guarded.copy(x.to(device)) if isinstance(x, torch.Tensor) else x for n, x in vars(given).items()
            }
            output = guarded.empty(named["input"], tuple(expected.shape), torch.float16)
            launch.launch_gated_mlp(Inputs(**named), output, table=table)
            guarded.check()
            error = (output.cpu().double() - expected).norm() / expected.norm()
        worst = max(worst, error.nan_to_num(float("inf")).item())
    return worst


if __name__ == "__main__":
    from tests.still_kernels import interpreter16, quick_interpreter

    torch.set_num_threads(1)
    quick_interpreter.install()
    interpreter16.install()
    print(json.dumps({name: run_case(name) for name in sys.argv[1:] or CASES}))
