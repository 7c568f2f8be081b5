"""Which tensors of a package's graph are the hidden states that its layers read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from still_graphs.ops import OPS

if TYPE_CHECKING:
    from onnx import GraphProto

CONTRIB = ("output", "mean", "deviation", "sum")
"""Outputs of ONNX Runtime's own norms that add the residual first; other standard ops have no fourth output."""


def weights_of(graph: GraphProto) -> dict[str, frozenset[str]]:
    """By each value that weights alone make, one plus a norm's weight for instance, the names of the weights; constants have none."""
    found = {tensor.name: frozenset([tensor.name]) for tensor in graph.initializer}
    for node in graph.node:
        inputs = [name for name in node.input if name]
        if all(name in found for name in inputs) and not any(a.HasField("g") for a in node.attribute):
            names: frozenset[str] = frozenset().union(*(found[name] for name in inputs))
            found |= dict.fromkeys(node.output, names)
    return found


def layer_inputs(path: Path, layers: int) -> list[str]:
    """Names of what layers 1, 2, ... read, and where it is found what the norm behind the last reads: input, or sum, of the first node that
    has a weight of the layer, or of none. Empty where a layer is not found.

    The names are a guess by structure, which who uses them checks by numbers.
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
        sums = [name for name, said in zip(node.output, outputs, strict=False) if said == "sum" and name]
        value = [*sums, *read][0]
        found.append(casts.get(value, value))  # a norm may widen what it reads
    return found if len(found) >= layers - 1 and len(set(found)) == len(found) else []
