"""Conditions before and after passes. Each check returns a description of the fault, or ""."""

from __future__ import annotations

from collections.abc import Callable, Collection

from still_graphs.edits import CONTRIB
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN, OPS

Condition = Callable[["ir.Model"], str]

ABSENT_INPUTS = "absent_inputs"


def whole(model: ir.Model) -> str:
    """Every value that is read is an input, a weight, or the result of an earlier node."""
    return _unmade(model.graph, frozenset())


def _unmade(graph: ir.Graph, outer: Collection[ir.Value]) -> str:
    known = {*outer, *graph.inputs, *graph.initializers.values()}
    for node in graph:
        if lost := [v for v in node.inputs if v is not None and v not in known]:
            return f"the node {node.name}, which reads {lost[0].name} that nothing before it makes"
        for inner in (a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH):
            if wrong := _unmade(inner, known):
                return wrong
        known.update(node.outputs)
    lost = [v for v in graph.outputs if v not in known]
    return f"the output {lost[0].name}, which nothing makes" if lost else ""


def no_functions(model: ir.Model) -> str:
    names = sorted({f.name for f in model.functions.values()})
    return f"local functions {', '.join(names)}" if names else ""


def known_ops(model: ir.Model) -> str:
    """Every still node is an op of this version."""
    unknown = sorted({n.op_type for n in still_nodes(model)} - set(OPS))
    return f"nodes of the unknown ops {', '.join(unknown)}" if unknown else ""


def no_still_nodes(model: ir.Model) -> str:
    left = [n.name or n.op_type for n in still_nodes(model)]
    return f"the still nodes {', '.join(left[:3])}" if left else ""


def bodies(model: ir.Model) -> str:
    bare = [n.name or n.op_type for n in still_nodes(model) if n.op_identifier() not in model.functions]
    return f"still nodes without a function, {', '.join(bare[:3])}" if bare else ""


def imported(model: ir.Model) -> str:
    """The model imports the domain of every node."""
    strange = {n.domain for n in model.graph.all_nodes()} - set(model.opset_imports)
    return f"nodes of the domains {', '.join(sorted(strange))}, which it does not import" if strange else ""


def plugin_nodes(model: ir.Model) -> str:
    """Every still node has the attributes that a plugin's creator needs."""
    needed = {"plugin_namespace", "plugin_version", ABSENT_INPUTS}
    bare = [
        str(n.name)
        for n in still_nodes(model)
        if not needed | {a.name for a in OPS[n.op_type].attributes} <= set(n.attributes)
    ]
    return f"still nodes without the attributes of plugins: {', '.join(bare[:3])}" if bare else ""


def opset_at_least(version: int) -> Condition:
    def check(model: ir.Model) -> str:
        found = model.opset_imports.get("", 0)
        return f"opset {found}, below {version}" if found < version else ""

    return check


def opset_at_most(version: int) -> Condition:
    def check(model: ir.Model) -> str:
        found = model.opset_imports.get("", 0)
        return f"opset {found}, above {version}" if found > version else ""

    return check


def without(*ops: str) -> Condition:
    """No standard node of these types is left, including subgraphs."""

    def check(model: ir.Model) -> str:
        left = sorted({n.op_type for n in model.graph.all_nodes() if n.domain == ""} & set(ops))
        return f"nodes of type {', '.join(left)}" if left else ""

    return check


def only_ops(contrib: Collection[str]) -> Condition:
    """Every node is a standard op, one of the com.microsoft ops in `contrib`, or calls a function of such nodes."""

    def check(model: ir.Model) -> str:
        parts: tuple[ir.Graph | ir.Function, ...] = (model.graph, *model.functions.values())
        left = {
            f"{n.domain}::{n.op_type}"
            for part in parts
            for n in part.all_nodes()
            if n.domain != "" and n.op_identifier() not in model.functions
            if not (n.domain == CONTRIB and n.op_type in contrib)
        }
        return f"nodes that the host has not, {', '.join(sorted(left))}" if left else ""

    return check


def no_int64_io(model: ir.Model) -> str:
    wide = [str(v.name) for v in (*model.graph.inputs, *model.graph.outputs) if v.dtype == ir.DataType.INT64]
    return f"int64 inputs or outputs {', '.join(wide[:3])}" if wide else ""


def still_nodes(model: ir.Model) -> list[ir.Node]:
    """Nodes of the domain in the main graph."""
    return [n for n in model.graph if n.domain == DOMAIN]
