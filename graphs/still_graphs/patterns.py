"""Patterns of a graph and what stands in their place: one matcher for all fusions.

A pattern is written as the expression that it finds, from what goes in to what comes out. Each of its objects stands for one value or node:

    X, ANGLES = Val(), Val()
    SPLIT = Op("Split", X, ..., outputs=2)
    GATED = Op("Mul", SPLIT[0], Op("Sigmoid", SPLIT[0]))
    Fusion((Op("Mul", GATED, SPLIT[1]),), replace, where)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, cast

from still_graphs.edits import drop_unused, put_in_place
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN, OPS

COMMUTES = ("Add", "Mul")
"""Ops whose two inputs are found in either order."""


class Val:
    """Any value, the same wherever this object stands; `check` must hold for it."""

    def __init__(self, check: Callable[[ir.Value], bool] | None = None) -> None:
        self.check = check


class Op:
    """A node and, as an input of another, its first result; `pattern[i]` is another of its results.

    Args:
        op: Its type, or the types that it may have.
        inputs: Patterns of all its inputs, None: one that is absent; with `...` in the end of the first ones.
        domain: Of the type.
        outputs: How many results it has, None: any number.
        kept: It stays, for it has other readers; what nobody reads after all goes.
        check: Must hold for it.
    """

    def __init__(
        self,
        op: str | Collection[str],
        *inputs: Pattern | EllipsisType,
        domain: str = "",
        outputs: int | None = None,
        kept: bool = False,
        check: Callable[[ir.Node], bool] | None = None,
    ) -> None:
        self.ops = (op,) if isinstance(op, str) else tuple(op)
        self.more = bool(inputs) and inputs[-1] is ...
        self.inputs = cast("tuple[Pattern, ...]", inputs[:-1] if self.more else inputs)
        self.domain, self.outputs, self.kept, self.check = domain, outputs, kept, check

    def __getitem__(self, index: int) -> Result:
        return Result(self, index)


@dataclass(frozen=True)
class Result:
    """The result `index` of a node."""

    of: Op
    index: int


class Either:
    """The first of some patterns that fits."""

    def __init__(self, *patterns: Pattern) -> None:
        self.patterns = patterns


Pattern = Val | Op | Result | Either | None


class Match:
    """What the objects of a pattern stand for, and the nodes that come in its place."""

    def __init__(self, found: Mapping[Any, Any], results: Sequence[ir.Value]) -> None:
        self._found, self.results = found, results
        self.new: list[ir.Node] = []

    def __contains__(self, pattern: Val | Op) -> bool:
        """Whether an alternative that has `pattern` was found."""
        return pattern in self._found

    def value(self, pattern: Val | Op | Result) -> ir.Value:
        """The value of a pattern, of an Op its first result."""
        if isinstance(pattern, Val):
            return cast("ir.Value", self._found[pattern])
        of, index = (pattern.of, pattern.index) if isinstance(pattern, Result) else (pattern, 0)
        return self.node(of).outputs[index]

    def node(self, pattern: Op) -> ir.Node:
        """The node of a pattern."""
        return cast("ir.Node", self._found[pattern])

    def nodes(self) -> dict[Op, ir.Node]:
        """The nodes of all patterns."""
        return {pattern: node for pattern, node in self._found.items() if isinstance(pattern, Op)}

    def add(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        name: str,
        domain: str = "",
        outputs: int = 1,
    ) -> Sequence[ir.Value]:
        """A node that comes in the place of the pattern; its results."""
        self.new.append(ir.node(op, inputs, attributes or {}, domain=domain, name=name, num_outputs=outputs))
        return self.new[-1].outputs


@dataclass(frozen=True)
class Fusion:
    """A pattern and what comes in its place.

    Args:
        results: What others may read of the pattern, from which it is found backwards; the first is looked for in the order of the graph.
        replace: Adds nodes to the match; gives for each result the value that has its name and readers from then on.
        where: What must hold for the whole.
        at: The node in whose place the new ones come; None: that of the first result.
        alone: Nothing else reads what is computed inside; else that stays for those who do.
    """

    results: tuple[Op | Result, ...]
    replace: Callable[[Match], Sequence[ir.Value]]
    where: Callable[[Match], bool] = field(default=lambda match: True)
    at: Op | None = None
    alone: bool = True

    def match(self, graph: ir.Graph, root: ir.Node) -> Match | None:
        """The pattern whose first result `root` makes, if it is there and may be fused."""
        for found in _all_results(graph, self.results, root, {}):
            match = Match(found, [])
            match.results = [match.value(result) for result in self.results]
            if (not self.alone or _closed(match)) and self.where(match):
                return match
        return None

    def apply(self, graph: ir.Graph, match: Match) -> None:
        """Put the new nodes in the place of the pattern's."""
        new = self.replace(match)
        place = match.node(self.at or _op(self.results[0]))
        graph.insert_before(place, match.new)
        for old, value in zip(match.results, new, strict=True):
            put_in_place(old, value)
        if self.alone:
            graph.remove([node for pattern, node in match.nodes().items() if not pattern.kept], safe=True)


def fuse(model: ir.Model, *fusions: Fusion) -> int:
    """Replace what the patterns find in the main graph, in place, one fusion after the other; how many were found."""
    graph, count = model.graph, 0
    for fusion in fusions:
        for root in list(graph):
            match = fusion.match(graph, root) if root.graph is graph else None
            if match is None:
                continue
            fusion.apply(graph, match)
            for node in match.new:
                if node.domain:
                    graph.opset_imports[node.domain] = OPS[node.op_type].version if node.domain == DOMAIN else 1
            count += 1
    if count:
        graph.sort()  # a result may have had readers before what else its pattern reads
        drop_unused(graph)
    return count


def _op(pattern: Op | Result) -> Op:
    return pattern.of if isinstance(pattern, Result) else pattern


def _all_results(
    graph: ir.Graph, results: Sequence[Op | Result], root: ir.Node, found: Mapping[Any, Any]
) -> Iterator[Mapping[Any, Any]]:
    """What fits `root` as the maker of the first result, and any nodes as those of the others."""
    for bound in _node(_op(results[0]), root, found):
        rest = results[1:]
        while rest and _op(rest[0]) in bound:
            rest = rest[1:]
        if not rest:
            yield bound
            continue
        for node in graph:
            if node.op_type in _op(rest[0]).ops:
                yield from _all_results(graph, rest, node, bound)


def _node(pattern: Op, node: ir.Node, found: Mapping[Any, Any]) -> Iterator[Mapping[Any, Any]]:
    if pattern in found:
        if found[pattern] is node:
            yield found
        return
    given = list(node.inputs)
    while given and given[-1] is None:
        given.pop()
    if node.op_type not in pattern.ops or node.domain not in ((pattern.domain,) if pattern.domain else ("", "ai.onnx")):
        return
    if pattern.outputs not in (None, len(node.outputs)):
        return
    if not pattern.kept and any(node is other for other in found.values()):
        return  # two parts of a pattern are two nodes
    if len(given) < len(pattern.inputs) if pattern.more else len(given) != len(pattern.inputs):
        return
    if pattern.check is not None and not pattern.check(node):
        return
    orders = [given, given[::-1]] if node.op_type in COMMUTES else [given]
    for order in orders:
        yield from _inputs(pattern.inputs, order, {**found, pattern: node})


def _inputs(
    patterns: Sequence[Pattern], values: Sequence[ir.Value | None], found: Mapping[Any, Any]
) -> Iterator[Mapping[Any, Any]]:
    if not patterns:
        yield found
        return
    for bound in _value(patterns[0], values[0], found):
        yield from _inputs(patterns[1:], values[1:], bound)


def _value(pattern: Pattern, value: ir.Value | None, found: Mapping[Any, Any]) -> Iterator[Mapping[Any, Any]]:
    if pattern is None or value is None:
        if pattern is value:
            yield found
    elif isinstance(pattern, Either):
        for option in pattern.patterns:
            yield from _value(option, value, found)
    elif isinstance(pattern, Val):
        if pattern in found:
            if found[pattern] is value:
                yield found
        elif pattern.check is None or pattern.check(value):
            yield {**found, pattern: value}
    else:
        of, index = (pattern.of, pattern.index) if isinstance(pattern, Result) else (pattern, 0)
        maker = value.producer()
        if maker is not None and value.index() == index:
            yield from _node(of, maker, found)


def _closed(match: Match) -> bool:
    """Whether only the pattern reads what it computes but for its results."""
    inside = {node for pattern, node in match.nodes().items() if not pattern.kept}
    return all(
        value in match.results or (not value.is_graph_output() and all(use.node in inside for use in value.uses()))
        for node in inside
        for value in node.outputs
    )
