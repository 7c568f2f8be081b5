"""Cases that hold the Triton kernels of still::Attention to the definition; as a program (DTYPE [NAME ...]): run them in Triton's
interpreter, print the errors; "shuffled" for DTYPE: in float32, the programs of each grid in some order.

The interpreter must be chosen before Triton is imported, so the tests start this file in a process of its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.attention.meaning import AttentionState, Inputs
from still_kernels.codes import dequantized, quantized
from tests.still_kernels.attention.inputs import Layer, Split, calls
from tests.still_kernels.guards import guarded_workspaces, shuffle_programs

SMALL = Layer(6, 2, 24, 300)
"""No size is a power of two that the kernels would not have to mask."""


@dataclass(frozen=True)
class Case:
    """A layer, how its sequences are cut into calls, and what the inputs are."""

    layer: Layer = SMALL
    splits: tuple[Split, ...] = (33, [70, 7], [0, 40], [129, 2], 1, [1, 0])
    sharpness: float = 2.0
    cache: str = "float"


CASES = {
    "prefill": Case(),
    "decode": Case(splits=(1, 1, 40, 1, [1, 0], [0, 1], 1)),
    "some tokens": Case(splits=(20, 5, [3, 9], [10, 1], [0, 0], 7)),
    "splits": Case(Layer(6, 2, 24, 700), (600, 1, [1, 0], [4, 1], 1)),
    "ragged splits": Case(Layer(6, 2, 24, 700), ([600, 1], 1, [2, 3], 1)),
    "one head each": Case(Layer(2, 2, 20, 300), (140, 1, [2, 30], 1)),
    "large group": Case(Layer(20, 1, 16, 300), (40, 1, [1, 0], 2)),
    "wide heads": Case(Layer(2, 1, 72, 200), (66, 1, 20, 1)),
    "widest heads": Case(Layer(2, 1, 256, 64), (30, 1)),
    "codes": Case(splits=(33, [70, 7], 1, [0, 40], [129, 2], 1, [1, 0], [3, 9]), cache="int8"),
    "codes, splits": Case(Layer(6, 2, 24, 700), ([600, 1], 1, [1, 0], [4, 1], 1), cache="int8"),
    "far apart": Case(splits=(66, 1, 1), sharpness=30.0),
}


def untouched(x: Tensor) -> Tensor:
    """Where a tensor still has what `Guarded` filled it with."""
    return x.isnan() if x.dtype.is_floating_point else x == 113


def run_case(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Greatest difference of the outputs from the definition, relative above 1, and of the filled rows of the cache, over all calls.

    Outputs, workspaces and what is not filled of the cache start as NaN, and a write outside of them is an error.
    """
    from still_kernels.attention import call as launch

    case = CASES[name]
    layer = case.layer
    errors = {"output": 0.0, "key": 0.0, "value": 0.0}
    with guarded_workspaces() as guarded:
        empty = AttentionState.empty(2, layer.kv_heads, layer.dim, layer.rows, dtype, device, case.cache)
        made = {n: guarded.empty(x, tuple(x.shape), x.dtype) for n, x in empty.tensors().items() if n != "length"}
        state = AttentionState(**made, length=torch.zeros(2, dtype=torch.int64, device=device))
        for number, call in enumerate(calls(layer, case.splits, dtype, sharpness=case.sharpness, cache=case.cache)):
            inputs = [call.feeds[n].to(device) for n in ("query", "key", "value")]
            new = call.feeds["new_tokens"].to(device, torch.int32 if number % 3 else torch.int64)
            output = guarded.empty(inputs[0], tuple(inputs[0].shape), dtype)
            launch.launch_attention(Inputs(*inputs, new), state, output)
            state.length.copy_(call.state.length)
            pairs = {"output": (output.cpu(), call.output)}
            filled = torch.arange(layer.rows) < call.state.length[:, None]  # [B, N]
            for what in ("key", "value"):
                found, wanted = getattr(state, what).cpu(), getattr(call.state, what)
                behind = untouched(found.transpose(1, 2)[~filled])
                if case.cache == "int8":
                    scale = made[f"{what}_scale"].cpu()
                    behind = behind.all() & untouched(scale.transpose(1, 2)[~filled]).all()
                    own = quantized(wanted)
                    assert torch.equal(found.transpose(1, 2)[filled], own[0].transpose(1, 2)[filled]), f"{name}: {what}"
                    found = dequantized(found, scale, dtype)
                assert bool(behind.all()), f"{name}: {what} written behind what is filled"
                pairs[what] = found.transpose(1, 2)[filled], wanted.transpose(1, 2)[filled]
            for what, (got, wanted) in pairs.items():
                difference = (got.double() - wanted.double()).abs() / wanted.double().abs().clamp_min(1)
                worst = difference.nan_to_num(float("inf"), float("inf")).max().item() if difference.numel() else 0.0
                errors[what] = max(errors[what], worst)
        guarded.check()
    return errors


def run_beyond(device: str = "cpu") -> None:
    """Rows that outgrow the state, and counts that make no sense: NaN where a token has no place, and no write outside."""
    from still_kernels.attention import call as launch

    layer = Layer(6, 2, 24, 40)
    for tokens, past, new in (
        (30, [20, 3], [30, 30]),
        (1, [40, 39], [1, 1]),
        (1, [-77, 2**40], [2**31, 10**12]),
        (64, [-1, 2**62], [-5, 2**40]),
    ):
        with guarded_workspaces() as guarded:
            inputs = [
                torch.randn(2, tokens, h, layer.dim, device=device)
                for h in (layer.heads, layer.kv_heads, layer.kv_heads)
            ]
            state = AttentionState(
                *(guarded.copy(torch.zeros(2, layer.kv_heads, layer.rows, layer.dim, device=device)) for _ in "kv"),
                length=torch.tensor(past, device=device),
            )
            output = guarded.empty(inputs[0], tuple(inputs[0].shape), torch.float32)
            launch.launch_attention(Inputs(*inputs, torch.tensor(new, device=device)), state, output)
            guarded.check()
            if past[0] == 20:
                lost = output.isnan().all(-1).all(-1)
                assert lost[0].tolist() == [p >= 20 for p in range(30)] and not bool(lost[1].any())
            if past[0] == 40:
                assert bool(output[0].isnan().all()) and not bool(output[1].isnan().any())


def main(arguments: list[str]) -> None:
    from tests.still_kernels import quick_interpreter

    quick_interpreter.install()
    kind, *names = arguments
    torch.set_num_threads(1)
    if kind == "beyond":
        run_beyond()
        print("{}")
        return
    if kind == "shuffled":
        shuffle_programs()
    if kind in ("float16", "bfloat16"):
        from tests.still_kernels import interpreter16

        interpreter16.install()
    dtype = torch.float32 if kind == "shuffled" else getattr(torch, kind)
    print(json.dumps({name: run_case(name, dtype=dtype) for name in names}))


if __name__ == "__main__":
    main(sys.argv[1:])
