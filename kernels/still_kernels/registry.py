"""The kernels of every op, found by its spec; generic code that compiles and packs imports no op's module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from still_graphs.errors import UnsupportedError
from still_graphs.ops import OPS
from still_kernels.op_kernels import Op, OpKernels
from still_kernels.plan import Call
from still_kernels.ties import Ties


def op_names() -> list[str]:
    """Ops that have kernels."""
    return [name for name in OPS if _has_kernels(name)]


def op_of(name: str) -> Op:
    """The `Op` by its ONNX name.

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
    """The kernels of an op; errors: see `op_of`."""
    return op_of(name).kernels


def variants_of(calls: Iterable[tuple[Any, Call]], refusal: str, advice: str) -> dict[str, list[Any]]:
    """The kernels that nodes need, by op, from their calls: one variant for each set of choices.

    Raises:
        UnsupportedError: No kernel covers a node: `refusal`, the node, what the kernels have, and `advice`.
    """
    variants: dict[str, list[Any]] = {}
    for node, call in calls:
        kernels = kernels_of(node.op_type)
        if reasons := kernels.refusals(call, ahead=True):
            raise UnsupportedError(f"{refusal} {node.name or node.op_type}: {' '.join(reasons)} {advice}")
        variant, known = kernels.variant_of(call), variants.setdefault(node.op_type, [])
        if variant not in known:
            known.append(variant)
    return variants


def ties_of(manifest: Mapping[str, Any]) -> Ties:
    """The ties of a package's ops, by its manifest, for ops with a module `ties`. No torch."""
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
