"""Find the tensors of a graph that are the hidden states each layer reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from still_graphs.ops import OPS

if TYPE_CHECKING:
    from onnx import GraphProto

CONTRIB = ("output", "mean", "deviation", "sum")
"""Outputs of ONNX Runtime's norms that add the residual first. No other standard op has four outputs."""


def weights_of(graph: GraphProto) -> dict[str, frozenset[str]]:
    """Names of the weights that each value is computed from, for values that depend on weights alone (one plus a norm's weight, say)."""
    found = {tensor.name: frozenset([tensor.name]) for tensor in graph.initializer}
    for node in graph.node:
        inputs = [name for name in node.input if name]
        if all(name in found for name in inputs) and not any(a.HasField("g") for a in node.attribute):
            names: frozenset[str] = frozenset().union(*(found[name] for name in inputs))
            found |= dict.fromkeys(node.output, names)
    return found


def layer_inputs(path: Path, layers: int) -> list[str]:
    """Names of what layers 1, 2, ... and the norm after the last read; empty if a layer is not found.

    Found by structure: the input, or sum, of the first node with a weight of the layer. The caller checks them by numbers.
    """
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    weights = weights_of(graph)
    casts = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Cast"}
    found: list[str] = []
    for node in graph.node:
        read = [name for name in node.input if name and name not in weights]
        if not read:
            continue
        begin, number = f"model.layers.{len(found) + 1}.", len(found)
        names = [name for value in node.input for name in sorted(weights.get(value, ()))]
        own = [name for name in names if name.startswith("model.") and name.endswith("norm.weight")]
        last = number == layers - 1 and bool(own) and not own[0].startswith("model.layers.")
        if number == layers or not (last or any(name.startswith(begin) for name in names)):
            continue
        outputs = [each.name for each in OPS[node.op_type].outputs] if node.op_type in OPS else CONTRIB
        sums = [name for name, output in zip(node.output, outputs, strict=False) if output == "sum" and name]
        value = [*sums, *read][0]
        found.append(casts.get(value, value))  # a norm may cast its input
    return found if len(found) >= layers - 1 and len(set(found)) == len(found) else []
