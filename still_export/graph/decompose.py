"""Faster decomposition and type promotion for torch's ONNX exporter: without running the program again, half of an export's time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, Node

_ATEN = torch.ops.aten
_CASTS = (_ATEN.to.dtype, _ATEN.to.device, _ATEN.type_as.default)
_VIEWS = (_ATEN.flatten.using_ints, _ATEN.unflatten.int)
_SQUARE, _FROM, _EYE = _ATEN.square.default, _ATEN.rsub.Scalar, _ATEN.eye.default
_SAME = (_ATEN.detach_.default, _ATEN.contiguous.default)
_RENAMED = {_ATEN.__and__.Tensor: _ATEN.bitwise_and.Tensor, _ATEN.__or__.Tensor: _ATEN.bitwise_or.Tensor}
_KNOWN = {*_CASTS, *_VIEWS, _SQUARE, _FROM, _EYE, *_SAME, *_RENAMED}
_WHOLE = (
    *(_ATEN.linear.default, _ATEN.matmul.default, _ATEN.einsum.default, _ATEN.conv1d.default, _ATEN.pad.default),
    *(_ATEN.reshape.default, _ATEN.chunk.default, _ATEN.expand_as.default, _ATEN.repeat_interleave.self_int),
    *(_ATEN.layer_norm.default, _ATEN.softmax.int, _ATEN.scaled_dot_product_attention.default, _ATEN.sym_size.int),
    *(_ATEN.where.Scalar, _ATEN.where.ScalarSelf, _ATEN.where.ScalarOther),
)
"""Composite torch ops in these models that the exporter translates as a whole."""


class _Other(Exception):
    """A node that is more than a rename of an ONNX op."""


def decompose_simply(program: torch.export.ExportedProgram) -> None:
    """Patch `program.run_decompositions`, so that it traces the program again only where it must.

    Casts, views and few others are the ops of most programs that are to be decomposed: what they become is known. The program itself is
    changed, and returned: it is used up.
    """
    anew = program.run_decompositions

    def run_decompositions(table: Mapping[Any, Callable[..., Any]] | None = None, **options: Any) -> Any:
        graph = program.graph
        if table is None or options:
            return anew(table, **options)  # type: ignore[arg-type]
        graph.eliminate_dead_code()
        try:
            simple = [node for node in graph.nodes if node.op == "call_function" and _is_simple(node, table)]
            known = _size_nodes(graph)
            sizes = [_sizes(node, known) if node.target in _VIEWS else None for node in simple]
        except _Other:
            return anew(table)  # type: ignore[arg-type]
        for node, shape in zip(simple, sizes, strict=True):
            _simplify(node, shape)
        graph.eliminate_dead_code()
        program.graph_module.recompile()
        return program

    program.run_decompositions = run_decompositions  # type: ignore[method-assign, assignment]


@contextmanager
def promote_simply() -> Iterator[None]:
    """Patch torch's type promotion pass: take values from the trace, and run only the nodes that change."""
    from torch.onnx._internal.fx.passes import type_promotion

    passing, run_node = type_promotion._TypePromotionInterpreter, type_promotion._TypePromotionInterpreter.run_node

    def promote(self: Any, node: Node) -> Any:
        if node.op != "call_function" or "val" not in node.meta:
            return run_node(self, node)
        with self._set_current_node(node):
            if rule := type_promotion.get_type_promotion_rule(node, self.type_promotion_table):
                self._maybe_promote_node(node, rule)
        return node.meta["val"]

    passing.run_node = promote  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        passing.run_node = run_node  # type: ignore[method-assign]


def _is_simple(node: Node, table: Mapping[Any, Any]) -> bool:
    """Whether the decomposition of `node` is known (True) or ONNX has its op (False). Raises _Other if it mutates inputs, has subgraphs or
    other decompositions."""
    op: Any = node.target
    if op in _KNOWN and not (op is _FROM and len(node.args) > 2):
        return True
    if op in table or isinstance(op, torch._ops.HigherOrderOperator):
        raise _Other
    if isinstance(op, torch._ops.OpOverload) and (op._schema.is_mutable or (op._can_decompose() and op not in _WHOLE)):
        raise _Other
    return False


def _sizes(view: Node, known: dict[Any, Node]) -> list[int | Node]:
    """Sizes of a view's result: numbers, nodes that compute a size, or -1 for one without a node."""
    sizes = [s if isinstance(s, int) else known.get(s.node.expr, -1) for s in view.meta["val"].shape]
    if sizes.count(-1) > 1:
        raise _Other
    return sizes


def _size_nodes(graph: Graph) -> dict[Any, Node]:
    """Nodes for the sizes of inputs, by size, placed after the inputs; unused ones are removed as dead code."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    known: dict[Any, Node] = {}
    for node in [node for node in graph.nodes if node.target is _ATEN.sym_size.int and node.args[0] in inputs]:
        known.setdefault(node.meta["val"].node.expr, node)
        inputs[-1].append(node)
    with graph.inserting_after(inputs[-1]):
        for node in inputs:
            for axis, size in enumerate(getattr(node.meta.get("val"), "shape", ())):
                if not isinstance(size, int) and size.node.expr not in known:
                    known[size.node.expr] = graph.call_function(_ATEN.sym_size.int, (node, axis))
                    known[size.node.expr].meta["val"] = size
    return known


def _simplify(node: Node, sizes: list[int | Node] | None) -> None:
    """Replace a view by one with these sizes, a no-op by its operand, and other nodes by torch's decomposition."""
    op: Any = node.target
    source, dtype = node.args[0], node.meta["val"].dtype
    if op is _EYE:
        return _as_comparison(node)
    assert isinstance(source, Node)
    if sizes is not None:
        node.target, node.args, node.kwargs = _ATEN.reshape.default, (source, sizes), {}
    elif op is _SQUARE:
        node.target, node.args = _ATEN.pow.Tensor_Scalar, (source, 2)
    elif op is _FROM:
        node.target, node.args = _ATEN.sub.Tensor, (node.args[1], source)
    elif op in _RENAMED:
        node.target = _RENAMED[op]
    elif source.meta["val"].dtype == dtype and not any(user.op == "output" for user in node.users):
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)
    else:
        node.target, node.args, node.kwargs = _ATEN._to_copy.default, (source,), {"dtype": dtype}


def _as_comparison(eye: Node) -> None:
    """Replace an identity matrix by row index == column index."""
    matrix: Any = eye.meta["val"]

    def of(op: Any, *arguments: Any, **options: Any) -> Node:
        node = eye.graph.call_function(op, arguments, options)
        node.meta["val"] = op(*(x.meta["val"] if isinstance(x, Node) else x for x in arguments), **options)
        return node

    with matrix.fake_mode, eye.graph.inserting_before(eye):
        column = of(_ATEN.arange.default, len(matrix))
        same = of(_ATEN.eq.Tensor, of(_ATEN.unsqueeze.default, column, -1), column)
        eye.replace_all_uses_with(of(_ATEN._to_copy.default, same, dtype=matrix.dtype))
    eye.graph.erase_node(eye)
