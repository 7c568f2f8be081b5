"""Compare a graph's constants other than weights with the model's: epsilons of norms, tables such as rotary frequencies.

Rounding hides them: an epsilon ten times as large moves no more than a float16 number's last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from still_export.package.files import HEAD, MODEL, VISION
from still_export.proof.layer_inputs import weights_of
from still_export.proof.verdict import Check

if TYPE_CHECKING:
    from still_export.models.load import Source

DEFAULT = 1e-5
"""ONNX's default epsilon."""
OFF = 1e-6
"""Allowed relative difference: constants are stored in another type."""
EPSILON = "epsilon"
"""Name of a norm's attribute; fused ops have names that end with it."""
PREFIX = "model."
"""Before a table's name in a graph."""


def check_constants(folder: Path, manifest: Mapping[str, Any], source: Source) -> Check:
    """Compare epsilons and tables of all graphs of a package with those of the model `source`."""
    import onnx

    model = source.outline()
    modules, tables = dict(model.named_modules()), dict(model.named_buffers())
    graphs = [MODEL, *(n for n in manifest["files"] if n.endswith(".onnx") and n not in (MODEL, VISION, HEAD))]
    count, wrong = 0, list[tuple[str, str]]()
    for name in graphs:
        graph = onnx.load(folder / name, load_external_data=False).graph
        for weight, found in _epsilons(graph):
            module = modules.get(weight.removesuffix(".weight"))
            right = next(
                (x for key in ("variance_epsilon", "eps") if (x := getattr(module, key, None)) is not None), None
            )
            if right is None:
                continue
            count += 1
            if abs(found - right) > OFF * right:
                wrong.append((weight, f"the epsilon of {weight} in {name} is {found:.6g}, the model's {right:.6g}"))
        for tensor in graph.initializer:
            table = tables.get(tensor.name.removeprefix(PREFIX))
            if table is None or table.is_meta or not table.is_floating_point() or table.numel() != np.prod(tensor.dims):
                continue
            count += 1
            values = onnx.numpy_helper.to_array(tensor, str(folder)).astype(np.float64).ravel()
            expected = table.double().numpy().ravel()
            same = np.abs(values - expected) <= OFF * np.abs(expected)
            if not same.all():
                at = int(same.argmin())
                what = f"{tensor.name}[{at}] in {name} is {values[at]:.6g}, the model's {expected[at]:.6g}"
                wrong.append((tensor.name, what))
    return Check.of(f"{count} epsilons and tables are the model's", wrong)


def _epsilons(graph: Any) -> Iterator[tuple[str, float]]:
    """(weight name, epsilon) of every norm whose weight is one of the model's."""
    weights = weights_of(graph)
    for node in graph.node:
        epsilons = [a.f for a in node.attribute if a.name.endswith(EPSILON)]
        if not epsilons and not (node.op_type.endswith("Normalization") and not node.domain):
            continue
        names = {name for value in node.input for name in weights.get(value, ()) if name.endswith("norm.weight")}
        if len(names) == 1:
            yield names.pop(), epsilons[0] if epsilons else DEFAULT
