"""What torch's ONNX exporter decomposes of a traced program. Doing it by another trace was half of the time of an export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

_ATEN = torch.ops.aten
_CASTS = (_ATEN.to.dtype, _ATEN.to.device, _ATEN.type_as.default)
_VIEWS = (_ATEN.flatten.using_ints, _ATEN.unflatten.int)


class _Other(Exception):
    """A node that is more than another name for what ONNX has."""


def decompose_simply(program: torch.export.ExportedProgram) -> None:
    """From now on let `program.run_decompositions` trace the program anew only where it must.

    Casts and views are the ops of most programs that are to be decomposed: what they become is known. The program itself is changed, and
    returned: it is used up.
    """
    anew = program.run_decompositions

    def run_decompositions(table: Mapping[Any, Callable[..., Any]] | None = None, **options: Any) -> Any:
        graph = program.graph
        if table is None or options:
            return anew(table, **options)  # type: ignore[arg-type]
        graph.eliminate_dead_code()
        try:
            simple = [node for node in graph.nodes if node.op == "call_function" and _is_simple(node, table)]
            sizes = [_sizes(node, graph) if node.target in _VIEWS else None for node in simple]
        except _Other:
            return anew(table)  # type: ignore[arg-type]
        for node, shape in zip(simple, sizes, strict=True):
            _simplify(node, shape)
        program.graph_module.recompile()
        return program

    program.run_decompositions = run_decompositions  # type: ignore[method-assign, assignment]


def _is_simple(node: Node, table: Mapping[Any, Any]) -> bool:
    """Whether `node` is a cast or a view; no: ONNX has its op. Raises _Other for what changes its inputs, has graphs or is decomposed."""
    op: Any = node.target
    if op in _CASTS or op in _VIEWS:
        return True
    if op in table or isinstance(op, torch._ops.HigherOrderOperator):
        raise _Other
    if isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable:
        raise _Other
    return False


def _sizes(view: Node, graph: Graph) -> list[int | Node]:
    """Of a view's result: numbers, and nodes before it that say a size; -1 for one that none says."""
    known: dict[Any, Node] = {}
    for node in graph.nodes:
        if node is view:
            break
        if node.target is _ATEN.sym_size.int:
            known.setdefault(node.meta["val"].node.expr, node)
    sizes = [s if isinstance(s, int) else known.get(s.node.expr, -1) for s in view.meta["val"].shape]
    if sizes.count(-1) > 1:
        raise _Other
    return sizes


def _simplify(node: Node, sizes: list[int | Node] | None) -> None:
    """A view becomes one of these sizes, a cast to what the value is the value, and another cast a copy in its type."""
    source, dtype = node.args[0], node.meta["val"].dtype
    assert isinstance(source, Node)
    if sizes is not None:
        node.target, node.args, node.kwargs = _ATEN.reshape.default, (source, sizes), {}
    elif source.meta["val"].dtype == dtype and not any(user.op == "output" for user in node.users):
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)
    else:
        node.target, node.args, node.kwargs = _ATEN._to_copy.default, (source,), {"dtype": dtype}
