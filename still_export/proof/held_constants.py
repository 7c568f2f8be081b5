"""What a graph computes with beside weights, held to the model's: the epsilon of every norm, tables such as frequencies of rotation, and
attributes of this project's ops that the configuration names.

Rounding hides them: an epsilon ten times as large moves no more than a float16 number's last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from still_export.package.files import HEAD, MODEL, VISION
from still_export.proof.layer_inputs import weights_of
from still_export.proof.verdict import Check
from still_graphs.ops import DOMAIN, OPS

if TYPE_CHECKING:
    from still_export.models.load import Source

DEFAULT = 1e-5
"""ONNX's epsilon of a norm that says none."""
OFF = 1e-6
"""Of itself that an epsilon, or a number of a table, may be off: it is written in another type."""
PREFIX = "model."
"""Before a table's name in a graph."""
SHOWN = 4


def check_constants(folder: Path, manifest: Mapping[str, Any], source: Source) -> Check:
    """Hold epsilons and tables of every graph of a package to those of the model `source`, where the graph names them."""
    import onnx

    model = source.outline()
    modules, tables = dict(model.named_modules()), dict(model.named_buffers())
    graphs = [MODEL, *(n for n in manifest["files"] if n.endswith(".onnx") and n not in (MODEL, VISION, HEAD))]
    layers = [vars(each.still) for each in model.modules() if is_dataclass(getattr(each, "still", None))]
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
        for what, found, right in _settings(graph, layers):
            count += 1
            if not (found == right or (isinstance(right, float) and abs(found - right) <= OFF * abs(right))):
                wrong.append((what, f"{what} in {name} is {found!r}, the model's {right!r}"))
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
    first = wrong[0] if wrong else ("", "")
    what = first[1] + (f"; {len(wrong)} are not" if len(wrong) > 1 else "")
    notes = tuple(text for _, text in wrong[1 : 1 + SHOWN])
    return Check(f"{count} epsilons, tables and settings are the model's", not wrong, what, first[0], notes=notes)


def _settings(graph: Any, layers: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
    """Attributes of the op of `layers`, which are their configurations: its name and the attribute's, what it is, and what it should be."""
    from onnx import helper

    if not layers:
        return
    op = max(OPS, key=lambda name: len({spec.name for spec in OPS[name].attributes} & layers[0].keys()))
    nodes = [node for node in graph.node if node.domain == DOMAIN and node.op_type == op]
    if len(nodes) != len(layers):  # bodies in their place
        return
    usual = {spec.name: spec.default for spec in OPS[op].attributes}
    for node, layer in zip(nodes, layers, strict=True):
        for attribute in (a for a in node.attribute if a.name in layer):
            found, right = helper.get_attribute_value(attribute), layer[attribute.name]
            yield (
                f"{attribute.name} of {node.op_type}",
                found.decode() if isinstance(found, bytes) else found,
                usual[attribute.name] if right is None else right,
            )


def _epsilons(graph: Any) -> Iterator[tuple[str, float]]:
    """Of every norm whose weight is one of the model's, that weight's name and the epsilon."""
    weights = weights_of(graph)
    for node in graph.node:
        given = [a.f for a in node.attribute if a.name == "epsilon"]
        if not given and not (node.op_type.endswith("Normalization") and not node.domain):
            continue
        names = {name for value in node.input for name in weights.get(value, ()) if name.endswith("norm.weight")}
        if len(names) == 1:
            yield names.pop(), given[0] if given else DEFAULT
