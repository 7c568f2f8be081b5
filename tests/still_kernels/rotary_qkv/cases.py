"""Holds the kernel of still::RotaryQkv to float64; as a program ([NAME ...]): in Triton's interpreter, prints the errors.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

import json
import sys

import torch

from tests.rotary_qkv_cases import CASES, call, exact
from tests.still_kernels.triton_cases import guarded_workspaces


def run_case(name: str, device: str = "cpu") -> float:
    """Greatest relative error of an output of all calls, by Frobenius norm. Outputs start as NaN, a write outside is an error."""
    from still_kernels.rotary_qkv import Inputs, launch
    from still_kernels.rotary_qkv.tiles import tile_table
    from still_kernels.tile import changed

    case, worst = CASES[name], 0.0
    table = changed(tile_table(), "rotary", {"BC": 32}) if device == "cpu" else None
    for batch, count in case.rows:
        given = call(case, batch, count)
        expected = exact(given)
        with guarded_workspaces() as guarded:
            named = {
                n: guarded.copy(x.to(device)) if isinstance(x, torch.Tensor) else x for n, x in vars(given).items()
            }
            outputs = [guarded.empty(named["input"], tuple(x.shape), torch.float16) for x in expected]
            launch.launch_rotary_qkv(Inputs(**named), *outputs, table=table)
            guarded.check()
        for output, wanted in zip(outputs, expected, strict=True):
            error = (output.cpu().double() - wanted).norm() / wanted.norm()
            worst = max(worst, error.nan_to_num(float("inf")).item())
    return worst


if __name__ == "__main__":
    from tests.still_kernels import interpreter16, quick_interpreter

    torch.set_num_threads(1)
    quick_interpreter.install()
    interpreter16.install()
    print(json.dumps({name: run_case(name) for name in sys.argv[1:] or CASES}))
