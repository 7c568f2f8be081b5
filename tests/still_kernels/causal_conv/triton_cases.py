"""Cases that hold the Triton kernels of still::CausalConv to the loop over tokens; as a program (DTYPE [NAME ...]): run them in Triton's
interpreter, print the errors; "shuffled" for DTYPE: in float32, the programs of each grid in some order; "cuda:DTYPE": compiled, on a
GPU.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from still_kernels.causal_conv.meaning import empty_state
from tests.still_kernels.causal_conv.inputs import LAYERS, SPLITS, Layer, Split, calls
from tests.still_kernels.guards import guarded_workspaces, shuffle_programs


@dataclass(frozen=True)
class Case:
    """A layer, and how its sequences are cut into calls."""

    layer: Layer = LAYERS[0]
    splits: tuple[Split, ...] = tuple(SPLITS)


CASES = {
    **{f"layer {number}": Case(layer) for number, layer in enumerate(LAYERS)},
    "prompt": Case(LAYERS[2], (70, [9, 33], [1, 40], [0, 12], 1)),
    "many channels": Case(Layer(150, 4), (9, 1, [2, 33])),
    "with bias": Case(LAYERS[1], (9, [2, 40], [1, 1], [3, 1])),
}


def run_case(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Greatest difference of the outputs, relative above 1, over all calls; the state is copied, so exact.

    Outputs start as NaN, padding is NaN, and a write outside of a buffer is an error.
    """
    from still_kernels.causal_conv import call as launch

    case, worst = CASES[name], 0.0
    layer = case.layer
    with guarded_workspaces() as guarded:
        state = guarded.copy(empty_state(2, layer.channels, layer.taps, dtype, device))
        for number, call in enumerate(calls(layer, case.splits, dtype)):
            assert call.inputs.new_tokens is not None
            given = {n: guarded.copy(x.to(device)) for n, x in vars(call.inputs).items()
                     if isinstance(x, Tensor) and n != "new_tokens"}  # fmt: skip
            output = guarded.empty(given["input"], tuple(call.output.shape), dtype)
            counts = call.inputs.new_tokens.to(device, torch.int32 if number % 3 else torch.int64)
            launch.launch_causal_conv(replace(call.inputs, **given, new_tokens=counts), state, output)
            assert torch.equal(state.cpu().double(), call.state), name
            difference = (output.cpu().double() - call.output).abs() / call.output.abs().clamp_min(1)
            worst = max(worst, difference.nan_to_num(float("inf")).max().item())
        guarded.check()
    return worst


def main(arguments: list[str]) -> None:
    from tests.still_kernels import quick_interpreter

    kind, *names = arguments
    torch.set_num_threads(1)
    if kind.startswith("cuda:"):  # compiled: a case each process, as an illegal address ends all that follow
        dtype = getattr(torch, kind.removeprefix("cuda:"))
        print(json.dumps({name: run_case(name, "cuda", dtype) for name in names or CASES}))
        return
    quick_interpreter.install()
    if kind == "shuffled":
        shuffle_programs()
    if kind in ("float16", "bfloat16"):
        from tests.still_kernels import interpreter16

        interpreter16.install()
    dtype = torch.float32 if kind == "shuffled" else getattr(torch, kind)
    print(json.dumps({name: run_case(name, dtype=dtype) for name in names or CASES}))


if __name__ == "__main__":
    main(sys.argv[1:])
