"""Holds the kernel of still::AddRmsNorm to float64; as a program ([NAME ...]): in Triton's interpreter, prints the errors.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

import json
import sys

import torch

from tests.add_rms_norm_cases import CASES, call, exact
from tests.still_kernels.triton_cases import guarded_workspaces


def run_case(name: str, device: str = "cpu") -> float:
    """Greatest relative error of an output of all calls, by Frobenius norm. Outputs start as NaN, a write outside is an error."""
    from still_kernels.add_rms_norm import Inputs, launch
    from still_kernels.add_rms_norm.tiles import tile_table
    from still_kernels.tile import changed

    case, worst = CASES[name], 0.0
    wide = case.width > 1024
    table = changed(tile_table(0), "add_norm", {"BC": 64}) if device == "cpu" and not wide else None
    for batch, count in case.rows:
        given = call(case, batch, count)
        expected = exact(given)
        with guarded_workspaces() as guarded:
            named = {
                n: guarded.copy(x.to(device)) if isinstance(x, torch.Tensor) else x for n, x in vars(given).items()
            }
            outputs = [guarded.empty(named["input"], tuple(x.shape), torch.float16) for x in expected]
            launch.launch_add_rms_norm(Inputs(**named), *outputs, table=table)
            guarded.check()
        assert torch.equal(outputs[0].cpu().double(), expected[0]), "a sum is rounded once"
        error = (outputs[1].cpu().double() - expected[1]).norm() / expected[1].norm()
        worst = max(worst, error.nan_to_num(float("inf")).item())
    return worst


if __name__ == "__main__":
    from tests.still_kernels import interpreter16, quick_interpreter

    torch.set_num_threads(1)
    quick_interpreter.install()
    interpreter16.install()
    print(json.dumps({name: run_case(name) for name in sys.argv[1:] or CASES}))
