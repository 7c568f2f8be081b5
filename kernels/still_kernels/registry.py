"""The kernels of every op, found by its spec: what compiles, packs, times and tunes asks here; no op's own module does."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from still_graphs.errors import UnsupportedError
from still_graphs.ops import OPS
from still_kernels.op_kernels import Op, OpKernels
from still_kernels.ties import Ties

if TYPE_CHECKING:
    from still_kernels.work import OpWork


def op_names() -> list[str]:
    """Ops that have kernels."""
    return [name for name in OPS if _has_kernels(name)]


def op_of(name: str) -> Op:
    """What there is of an op, by its name in ONNX.

    Raises:
        UnsupportedError: It has no kernels.
    """
    if name not in OPS or not _has_kernels(name):
        raise UnsupportedError(
            f"op {name} has no GPU kernels; those that have: {', '.join(op_names())}. "
            "Export with --to onnx, which runs every op on the CPU."
        )
    return import_module(_place(name)).OP


def kernels_of(name: str) -> OpKernels:
    """The kernels of an op; errors as of `op_of`."""
    return op_of(name).kernels


def work_of(name: str) -> OpWork:
    """What bench and tune ask of an op.

    Raises:
        UnsupportedError: It has nothing to say.
    """
    work = op_of(name).work
    if work is None and _is_there(place := _place(name, "work")):
        found: OpWork = import_module(place).WORK
        return found
    if work is None:
        raise UnsupportedError(f"op {name} says nothing of its calls, so it can be neither timed nor tuned.")
    return work()


def ties_of(manifest: Mapping[str, Any]) -> Ties:
    """The ties of the ops that a package has, by its manifest: of those with a module `ties`. No torch."""
    places = (_place(name, "ties") for name in OPS if name in manifest["ops"])
    found = (import_module(place).ties_of(manifest) for place in places if _is_there(place))
    return Ties(ties for ties in found if ties)


def _place(name: str, part: str = "plan") -> str:
    return f"{OPS[name].package}.{part}"


def _has_kernels(name: str) -> bool:
    return _is_there(_place(name))


def _is_there(place: str) -> bool:
    try:
        return find_spec(place) is not None
    except ModuleNotFoundError as error:
        if not place.startswith(str(error.name)):  # a library that its folder imports
            raise
        return False
