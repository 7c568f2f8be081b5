"""What passes need of a graph and leave behind, as checks: each gives what is wrong, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import onnx
from onnx import TensorProto

from still_graphs.on_proto import on_proto
from still_graphs.ops import DOMAIN, OPS

Condition = Callable[[onnx.ModelProto], str]

ABSENT_INPUTS = "absent_inputs"


@on_proto
def no_functions(model: onnx.ModelProto) -> str:
    """No local function is left."""
    names = sorted({f.name for f in model.functions})
    return f"local functions {', '.join(names)}" if names else ""


@on_proto
def known_ops(model: onnx.ModelProto) -> str:
    """Every still node is an op of this version."""
    unknown = sorted({n.op_type for n in still_nodes(model)} - set(OPS))
    return f"nodes of the unknown ops {', '.join(unknown)}" if unknown else ""


@on_proto
def no_still_nodes(model: onnx.ModelProto) -> str:
    """Every still node was replaced."""
    left = [n.name or n.op_type for n in still_nodes(model)]
    return f"the still nodes {', '.join(left[:3])}" if left else ""


@on_proto
def plugin_nodes(model: onnx.ModelProto) -> str:
    """Every still node says what a plugin's creator needs."""
    bare = [
        n.name for n in still_nodes(model) if not {"plugin_namespace", ABSENT_INPUTS} <= {a.name for a in n.attribute}
    ]
    return f"still nodes without the attributes of plugins: {', '.join(bare[:3])}" if bare else ""


def opset_at_most(version: int) -> Condition:
    """The standard opset is at most `version`."""

    @on_proto
    def check(model: onnx.ModelProto) -> str:
        found = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)
        return f"opset {found}, above {version}" if found > version else ""

    return check


def without(*ops: str) -> Condition:
    """No standard node of these types is left, in subgraphs either."""

    @on_proto
    def check(model: onnx.ModelProto) -> str:
        left = sorted({n.op_type for n in _nodes(model.graph) if n.domain in ("", "ai.onnx")} & set(ops))
        return f"nodes of type {', '.join(left)}" if left else ""

    return check


def only_ops(contrib: Collection[str]) -> Condition:
    """Every node is a standard one, one of com.microsoft's ops `contrib`, or has a function of such nodes."""

    @on_proto
    def check(model: onnx.ModelProto) -> str:
        bodies = {(f.domain, f.name) for f in model.functions}
        nodes = [n for part in (model.graph, *model.functions) for n in _nodes(part)]
        left = {
            f"{n.domain}::{n.op_type}"
            for n in nodes
            if n.domain not in ("", "ai.onnx")
            and (n.domain, n.op_type) not in bodies
            and not (n.domain == "com.microsoft" and n.op_type in contrib)
        }
        return f"nodes that the host has not, {', '.join(sorted(left))}" if left else ""

    return check


@on_proto
def no_int64_io(model: onnx.ModelProto) -> str:
    """Inputs and outputs have no 64-bit integers."""
    wide = [
        v.name for v in (*model.graph.input, *model.graph.output) if v.type.tensor_type.elem_type == TensorProto.INT64
    ]
    return f"int64 inputs or outputs {', '.join(wide[:3])}" if wide else ""


def still_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Nodes of the domain in the main graph."""
    return [n for n in model.graph.node if n.domain == DOMAIN]


def _nodes(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)
