"""Calls of ops without a state, guarded, and how far off they are; what the cases of each share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from still_kernels.sizes import tensors_of
from still_kernels.tile import TileTable
from tests.still_kernels.triton_cases import guarded_workspaces


def launched(
    launch: Callable[..., None], given: Any, expected: Sequence[Tensor], table: TileTable | None, device: str
) -> list[Tensor]:
    """The outputs of a launch, shaped as what is expected: of its type, float16 where that is
    float64. They start as NaN or a sentinel, a write
    outside of them is an error."""
    with guarded_workspaces() as guarded:
        inputs = replace(given, **{name: guarded.copy(x.to(device)) for name, x in tensors_of(given).items()})
        like = next(iter(tensors_of(inputs).values()))
        kinds = (torch.float16 if x.dtype == torch.float64 else x.dtype for x in expected)
        outputs = [guarded.empty(like, tuple(x.shape), kind) for x, kind in zip(expected, kinds, strict=True)]
        launch(inputs, *outputs, table=table)
        guarded.check()
    return outputs


def worst_error(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Greatest relative error of an output, by Frobenius norm; infinity where a number is none."""
    pairs = zip(outputs, (y.double() for y in expected), strict=True)
    return max(((x.cpu().double() - y).norm() / y.norm()).nan_to_num(float("inf")).item() for x, y in pairs)


def main(run_case: Callable[[str], float], cases: Iterable[str]) -> None:
    """Run cases, those that the command line names, in Triton's interpreter, and print the errors."""
    from tests.still_kernels import interpreter16, quick_interpreter

    torch.set_num_threads(1)
    quick_interpreter.install()
    interpreter16.install()
    print(json.dumps({name: run_case(name) for name in sys.argv[1:] or cases}))
