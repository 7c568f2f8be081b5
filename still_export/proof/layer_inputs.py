"""Which tensors of a package's graph are the hidden states that its layers read."""

from __future__ import annotations

from pathlib import Path

from still_export.package.files import MODEL
from still_graphs.ops import OPS

CONTRIB = ("output", "mean", "deviation", "sum")
"""Outputs of ONNX Runtime's own norms that add the residual first; other standard ops have no fourth output."""


def layer_inputs(folder: Path, layers: int) -> list[str]:
    """Names of what layers 1, 2, ... read, and where it is found what the norm behind the last reads: input, or sum, of the first node that
    has a weight of the layer, or of none. Empty where a layer is not found.

    The names are a guess by structure, which who uses them checks by numbers.
    """
    import onnx

    graph = onnx.load(folder / MODEL, load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    found: list[str] = []
    for node in graph.node:
        begin, number = f"model.layers.{len(found) + 1}.", len(found)
        own = [
            name
            for name in node.input
            if name in weights and name.startswith("model.") and name.endswith("norm.weight")
        ]
        last = number == layers - 1 and bool(own) and not own[0].startswith("model.layers.")
        if number == layers or not (last or any(name.startswith(begin) for name in node.input)):
            continue
        outputs = [each.name for each in OPS[node.op_type].outputs] if node.op_type in OPS else CONTRIB
        sums = [name for name, said in zip(node.output, outputs, strict=False) if said == "sum"]
        read = [name for name in [*sums, *node.input] if name and name not in weights]
        if not read:
            return []
        found.append(read[0])
    return found if len(found) >= layers - 1 and len(set(found)) == len(found) else []
