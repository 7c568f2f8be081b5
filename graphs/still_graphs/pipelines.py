"""Ordered passes that bring a graph to a target: each says what it requires and what it ensures, and both are checked.

Passes of one op stand in its folder's fuse.py: `PASSES` by host, and `AFTER`, the folders of ops whose passes come before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from still_graphs.conditions import whole
from still_graphs.errors import UnsupportedError
from still_graphs.ops import OPS

if TYPE_CHECKING:
    import onnx_ir as ir

PLUGINS, CUDA, CPU = "plugins", "cuda", "cpu"
"""Hosts of ops' passes: TensorRT 8.6's plugins, ONNX Runtime on GPUs, and on CPUs with this project's kernels."""


@dataclass(frozen=True)
class Pass:
    """One pass over a graph: `run` edits it in place and counts its changes; `reason` says why the target needs it.

    `requires` and `ensures` hold before and after it (still_graphs.conditions) and give what is wrong, or nothing; None: nothing beyond
    what all graphs have, which is to be `whole`. `only`: traits of the model or its deployment without which the pass is left out.
    """

    run: Callable[[ir.Model], int]
    reason: str
    only: tuple[str, ...] = ()
    requires: Callable[[ir.Model], str] | None = None
    ensures: Callable[[ir.Model], str] | None = None

    @property
    def name(self) -> str:
        return self.run.__name__


def passes_of_ops(host: str) -> tuple[Pass, ...]:
    """All ops' passes for a host, in the order of `AFTER`, otherwise by folder name."""
    places = {spec.torch_name: f"{spec.package}.fuse" for spec in OPS.values()}
    found = {op: import_module(place) for op, place in places.items() if find_spec(place)}
    before = {op: [other for other in getattr(fuse, "AFTER", ()) if other in found] for op, fuse in found.items()}
    order = TopologicalSorter(before).static_order()
    return tuple(each for op in order for each in found[op].PASSES.get(host, ()))


Dump = Callable[[str, "ir.Model"], None]
"""Called with each pass's name and the graph after it."""


def run_passes(
    model: ir.Model, passes: Sequence[Pass], dump: Dump | None = None, traits: Collection[str] = ()
) -> dict[str, int]:
    """Run `passes` over `model`, in place.

    Returns:
        Changes by pass.

    Raises:
        UnsupportedError: A pass cannot take the graph; the message names it.
    """
    counts = {}
    for each in passes:
        if not set(each.only) <= set(traits):
            continue
        _demand(each.requires, model, f"before the pass {each.name}")
        try:
            counts[each.name] = each.run(model)
        except UnsupportedError as error:
            raise UnsupportedError(f"pass {each.name}: {error}") from error
        for ensured in (whole, each.ensures):
            _demand(ensured, model, f"after the pass {each.name}")
        if dump is not None:
            dump(each.name, model)
    return counts


def _demand(condition: Callable[[ir.Model], str] | None, model: ir.Model, when: str) -> None:
    """Raise UnsupportedError if a pass's precondition or postcondition does not hold."""
    wrong = condition(model) if condition is not None else ""
    if wrong:
        raise UnsupportedError(f"{when} the graph has {wrong}. Write the graph after each pass with --dump-dir.")
