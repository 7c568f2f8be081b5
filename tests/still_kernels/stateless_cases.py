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
from still_kernels.tile import Setting, TileTable, changed
from tests.still_kernels.guards import guarded_workspaces


def launched(
    launch: Callable[..., None], given: Any, expected: Sequence[Tensor], table: TileTable | None, device: str
) -> list[Tensor]:
    """The outputs of a launch, shaped as what is expected: of its type, that of the first input where that is float64. They start as NaN or
    a sentinel, a write outside of them is an error."""
    with guarded_workspaces() as guarded:
        inputs = replace(given, **{name: guarded.copy(x.to(device)) for name, x in tensors_of(given).items()})
        like = next(iter(tensors_of(inputs).values()))
        kinds = (like.dtype if x.dtype == torch.float64 else x.dtype for x in expected)
        outputs = [guarded.empty(like, tuple(x.shape), kind) for x, kind in zip(expected, kinds, strict=True)]
        launch(inputs, *outputs, table=table)
        guarded.check()
    return outputs


def worst_error(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Greatest relative error of an output, by Frobenius norm; infinity where a number is none."""
    pairs = zip(outputs, (y.double() for y in expected), strict=True)
    return max(((x.cpu().double() - y).norm() / y.norm()).nan_to_num(float("inf")).item() for x, y in pairs)


def worst_of(
    op: Any,
    case: Any,
    call: Callable[[Any, int, int], Any],
    exact: Callable[[Any], Any],
    device: str,
    tables: Sequence[TileTable | None] = (None,),
) -> float:
    """Greatest relative error of the outputs of a case's calls by all `tables`. Outputs start as NaN, a write outside is an error."""
    worst = 0.0
    for batch, count in case.rows:
        given = call(case, batch, count)
        expected = [found] if isinstance(found := exact(given), Tensor) else list(found)
        for table in tables:
            worst = max(worst, worst_error(launched(op.launch, given, expected, table, device), expected))
    return worst


def small(op: Any, variant: Any, device: str, **settings: Setting) -> list[TileTable | None]:
    """For interpreters the table of sm_90 with other settings of some kernels, such as small blocks; a GPU has its own."""
    if device != "cpu":
        return [None]
    table = op.tiles(variant, 90)
    for kernel, setting in settings.items():
        table = changed(table, kernel, setting)
    return [table]


def main(run_case: Callable[[str], float], cases: Iterable[str]) -> None:
    """Run cases, those that the command line names, in interpreters, and print the errors."""
    torch.set_num_threads(1)
    interpret()
    print(json.dumps({name: run_case(name) for name in sys.argv[1:] or cases}))


def interpret() -> None:
    """From now on kernels run in interpreters, which refuse arithmetic on 16-bit floats outside of assembly."""
    from still_kernels import launcher
    from tests.still_kernels import gluon_interpreter, interpreter16, quick_interpreter

    quick_interpreter.install()
    interpreter16.install()
    plain = launcher.Launcher.launch

    def launch(self: Any, what: Any, values: list[Any], variant: object | None) -> Any:
        if what.function.fn.__module__.rpartition(".")[2].startswith("gluon_"):
            return gluon_interpreter.run(
                what.function, what.grid, dict(zip(what.function.arg_names, values, strict=True))
            )
        return plain(self, what, values, variant)

    launcher.Launcher.launch = launch  # type: ignore[method-assign,assignment]
