"""Compare the settings of a graph's nodes with what PyTorch calls when it computes the user's model.

Three comparisons: attributes of this project's ops, one by one and in order; nonlinear standard functions (Sigmoid, Gelu), of which a graph
has at most as many as PyTorch calls; and scalar constants, each of which PyTorch uses, too. Comparing outputs would miss some: rounding
hides small differences, and prompts within the capacity do not reach all settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from still_export.models.ahead import PREFIX
from still_export.package.files import HEAD, MODEL, PORTABLE, VISION
from still_export.proof.held_constants import PREFIX as TABLES
from still_export.proof.torch_calls import TorchCalls, torch_calls
from still_export.proof.verdict import Check, Verdict
from still_graphs.ops import OPS
from still_graphs.spec import AttributeValue, OpSpec

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto

    from still_export.models.load import Source

OFF = 1e-6
"""Allowed relative difference: settings are stored in float32."""
BENDING: Mapping[str, tuple[str, ...]] = {
    "Sigmoid": ("sigmoid", "silu"),
    "Swish": ("silu",),
    "QuickGelu": ("silu", "sigmoid"),
    "Exp": ("exp", "expm1"),
    "Log": ("log", "log1p"),
    "Softmax": ("softmax",),
    "LogSoftmax": ("log_softmax",),
    "Sqrt": ("sqrt", "rsqrt"),
    "PRelu": ("prelu", "prelu_kernel"),
    "FastGelu": ("gelu",),
    "BiasGelu": ("gelu",),
    **{
        name: (name.lower(),)
        for name in (
            *("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Celu", "Cos", "Cosh", "Elu", "Erf", "Gelu"),
            *("HardSigmoid", "HardSwish", "Hardmax", "Mish", "Relu", "Selu", "Sin", "Sinh", "Softplus", "Softsign"),
            *("Tan", "Tanh"),
        )
    },
    "LeakyRelu": ("leaky_relu",),
    "ThresholdedRelu": ("threshold",),
}
"""Nonlinear functions of ONNX, with the PyTorch calls that become them."""
WORDS = {"Gelu": ("approximate", "none")}
"""Attributes of standard ops that are words, with their defaults."""
FLOATS = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}
"""By ONNX's number of a type."""


def check_settings(folder: Path, manifest: Mapping[str, Any], source: Source) -> Verdict:
    """Compare the settings of every graph of a package with what PyTorch calls.

    Args:
        source: The model, read from the user's files.
    """
    import onnx

    from still_export.targets.registry import packaged_target

    model = torch_calls(source)
    head = torch_calls(source.ahead()) if HEAD in manifest["files"] and source.ahead is not None else None
    calls = {name: model for name in manifest["files"] if name.endswith(".onnx") and name not in (VISION, HEAD)}
    if head is not None:
        calls[HEAD] = head
        calls |= {name: model + head for name in calls if name not in (MODEL, HEAD)}  # the portable graph contains both
    portable = packaged_target(dict(manifest)).portable
    settings, functions, numbers = _Findings(), _Findings(), _Findings()
    not_asked: list[str] = []
    for name, right in calls.items():
        graph = onnx.load(folder / name, load_external_data=False).graph
        nodes = list(_nodes(graph))
        inlined = [op for op in right.ops if not _nodes_of(nodes, op)]
        if inlined:
            not_asked.append(
                f"settings of {' and '.join(inlined)} in {name} by themselves: its nodes are others'; its outputs were compared"
            )
        for op in right.ops.keys() - set(inlined):
            settings.add(name, _settings(_nodes_of(nodes, op), op, right.ops[op]))
        if not inlined:
            functions.add(name, _functions(nodes, right))
        if portable or name == PORTABLE:
            numbers.add(name, _numbers(graph, nodes, right))
    if not portable:
        not_asked.append(f"single numbers in {MODEL}: passes of this target write others; its outputs were compared")
    verdict = Verdict([], not_asked)
    verdict.checks.append(settings.check("{} settings of this project's ops are the model's"))
    verdict.checks.append(functions.check("{} functions are those that PyTorch calls"))
    if numbers.count or portable:
        verdict.checks.append(numbers.check("{} single numbers are those that PyTorch computes with"))
    return verdict


class _Findings:
    """Number of compared settings, and what is wrong."""

    def __init__(self) -> None:
        self.count, self.wrong = 0, list[tuple[str, str]]()

    def add(self, graph: str, found: Iterator[tuple[str, str]]) -> None:
        """Add pairs (place, fault); an empty fault counts as compared."""
        for where, what in found:
            self.count += 1
            if what:
                self.wrong.append((where, f"{where} in {graph} {what}"))

    def check(self, name: str) -> Check:
        return Check.of(name.format(self.count), self.wrong)


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """Nodes of a graph and of the graphs in them."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def _nodes_of(nodes: Sequence[NodeProto], op: str) -> list[NodeProto]:
    """Nodes of an op; if there are none, of the op that has the same attributes and more, such as quantized experts."""
    spec = OPS[op]
    if found := [node for node in nodes if _is(node, spec)]:
        return found
    more = [
        s for s in OPS.values() if not s.traced and s.name.startswith(op) and s.attributes[:1] == spec.attributes[:1]
    ]
    return [node for node in nodes if spec.attributes and any(_is(node, s) for s in more)]


def _is(node: NodeProto, spec: OpSpec) -> bool:
    return bool(node.op_type == spec.name and node.domain == spec.domain)


def _settings(
    nodes: Sequence[NodeProto], op: str, calls: Sequence[Mapping[str, AttributeValue]]
) -> Iterator[tuple[str, str]]:
    """Compare every attribute of an op's nodes, including defaults."""
    from onnx import helper

    if len(nodes) != len(calls):
        yield op, f"is in {len(nodes)} nodes, and PyTorch calls it {len(calls)} times"
        return
    for number, (node, call) in enumerate(zip(nodes, calls, strict=True)):
        node_values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        for name, right in call.items():
            found = node_values.get(name, OPS[op].attribute(name).default)
            found = found.decode() if isinstance(found, bytes) else found
            same = found == right
            if isinstance(right, float) and isinstance(found, (int, float)):
                same = abs(found - right) <= OFF * abs(right)
            where = f"{name} of {op} {number}"
            yield where, "" if same else f"is {found!r}, the model's {right!r}"


def _functions(nodes: Sequence[NodeProto], right: TorchCalls) -> Iterator[tuple[str, str]]:
    """Compare nonlinear functions, with their words: the graph has at most as many as PyTorch calls."""
    found = Counter(node.op_type for node in nodes if node.op_type in BENDING)
    for op, count in found.items():
        most = sum(right.functions[name] for name in BENDING[op])
        more = f"is in {count} nodes, and PyTorch calls {' and '.join(BENDING[op])} {most} times"
        yield op, more * (count > most)
    words = Counter(
        (
            node.op_type,
            next((a.s.decode() for a in node.attribute if a.name == WORDS[node.op_type][0]), WORDS[node.op_type][1]),
        )
        for node in nodes
        if node.op_type in WORDS
    )
    for (op, word), count in words.items():
        most = sum(right.words[name, word] for name in BENDING[op])
        more = f"is {word!r} in {count} nodes, and PyTorch calls it so {most} times"
        yield f"{WORDS[op][0]} of {op}", more * (count > most)


def _numbers(graph: GraphProto, nodes: Sequence[NodeProto], right: TorchCalls) -> Iterator[tuple[str, str]]:
    """Compare every scalar that is not an integer: operands, and attributes of standard ops."""
    from onnx import numpy_helper

    constants: dict[str, TensorProto] = {t.name: t for t in graph.initializer if not _is_weight(t.name, right.tensors)}
    for node in nodes:
        if node.op_type == "Constant":
            constants |= {name: a.t for name in node.output for a in node.attribute if a.name == "value"}
    found: Counter[tuple[float, int]] = Counter()
    places: dict[tuple[float, int], str] = {}
    own_ops = {(spec.name, spec.domain) for spec in OPS.values()}
    for node in nodes:
        read = [(constants[name], f"input {index}") for index, name in enumerate(node.input) if name in constants]
        single = [(t, i) for t, i in read if t.data_type in FLOATS and np.prod(t.dims) == 1 and not t.external_data]
        values = [(float(numpy_helper.to_array(t).astype(np.float64).item()), t.data_type, i) for t, i in single]
        if (node.op_type, node.domain) not in own_ops:
            values += [(a.f, 1, a.name) for a in node.attribute if a.type == a.FLOAT]
        for value, kind, where in values:
            found[value, kind] += 1
            places.setdefault((value, kind), f"{where} of {node.op_type} {node.name}".rstrip())
    for (value, kind), count in found.items():
        most = sum(n for number, n in right.numbers.items() if _rounded(number, kind) == _rounded(value, kind))
        wrong = f"is {value:.6g}, and PyTorch computes with no such number"
        if 0 < most < count:
            wrong = f"is {value:.6g} in {count} nodes, and PyTorch computes with it {most} times"
        yield places[value, kind], wrong * (most < count)


def _is_weight(name: str, tensors: frozenset[str]) -> bool:
    """Whether the name is one of the model's tensors or a part of its codes; `held_weights` compares those."""
    bare = [name.removeprefix(start) for start in ("", TABLES, PREFIX)]
    return any(each in tensors or each.rpartition(".")[0] in tensors for each in bare)


def _rounded(value: float, kind: int) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(FLOATS[kind]))
