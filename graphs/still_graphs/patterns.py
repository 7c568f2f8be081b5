"""Patterns of graph nodes and their replacements: one matcher for all fusions.

A pattern is the expression that it finds, from inputs to outputs. Each of its objects stands for one value or node:

    X = Val()
    SPLIT = Op("Split", X, ..., outputs=2)
    SILU = Op("Mul", SPLIT[0], Op("Sigmoid", SPLIT[0]))
    Fusion((Op("Mul", SILU, SPLIT[1]),), replace, where)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, NamedTuple, cast

from still_graphs.conditions import no_functions
from still_graphs.edits import drop_unused, put_in_place
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN, OPS
from still_graphs.pipelines import Pass

COMMUTES = ("Add", "Mul")
"""Ops whose two inputs match in either order."""


class Val:
    """Any value, the same at every use of this object; `check` must accept it."""

    def __init__(self, check: Callable[[ir.Value], bool] = lambda value: True) -> None:
        self.check = check


class Op:
    """A node and, as an input of another Op, its first result. `pattern[i]` is another result.

    Args:
        op: Its type, or its possible types.
        inputs: Patterns of all inputs, None for an absent one; of the first ones only if `...` comes last.
        outputs: Number of results; None: any.
        shared: Other nodes may read it. It stays until nothing does.
        check: Must accept the node.
    """

    def __init__(
        self,
        op: str | Collection[str],
        *inputs: Pattern | EllipsisType,
        domain: str = "",
        outputs: int | None = None,
        shared: bool = False,
        check: Callable[[ir.Node], bool] = lambda node: True,
    ) -> None:
        self.ops, self.domain = ((op,) if isinstance(op, str) else tuple(op)), domain
        self.more = bool(inputs) and inputs[-1] is ...
        self.inputs = cast("tuple[Pattern, ...]", inputs[:-1] if self.more else inputs)
        self.outputs, self.shared, self.check = outputs, shared, check

    def __getitem__(self, index: int) -> Result:
        return Result(self, index)

    def takes(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> bool:
        """Whether `node` matches, except for its inputs."""
        fits = node.op_type in self.ops and node.domain == self.domain and self.outputs in (None, len(node.outputs))
        many = len(inputs) >= len(self.inputs) if self.more else len(inputs) == len(self.inputs)
        return fits and many and self.check(node)


class Result(NamedTuple):
    """Result `place` of a node."""

    of: Op
    place: int


class Either(NamedTuple):
    """The first of two patterns that matches."""

    first: Pattern
    second: Pattern


Pattern = Val | Op | Result | Either | None
Found = Mapping[Val | Op, Any]
"""Values and nodes by their patterns."""


class Match:
    """Values and nodes of one match; receives the nodes that replace them."""

    def __init__(self, found: Found, results: Sequence[Op | Result]) -> None:
        self.found, self.new = found, list[ir.Node]()
        self.results = [self.value(result) for result in results]
        self.gone = {node for pattern, node in found.items() if isinstance(pattern, Op) and not pattern.shared}

    def __contains__(self, pattern: Val | Op) -> bool:
        """Whether the match has `pattern`, if that is in an alternative."""
        return pattern in self.found

    def value(self, pattern: Val | Op | Result) -> ir.Value:
        """The value of a pattern; of an Op, its first result."""
        if isinstance(pattern, Val):
            return cast("ir.Value", self.found[pattern])
        of, index = _result(pattern)
        return self.node(of).outputs[index]

    def node(self, pattern: Op) -> ir.Node:
        return cast("ir.Node", self.found[pattern])

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
        """Add a node to the replacement and return its results."""
        self.new.append(ir.node(op, inputs, attributes or {}, domain=domain, name=name, num_outputs=outputs))
        return self.new[-1].outputs

    def closed(self) -> bool:
        """Whether nothing outside of the pattern reads its inner values."""
        inside = [value for node in self.gone for value in node.outputs if value not in self.results]
        readers = {use.node for value in inside for use in value.uses()}
        return readers <= self.gone and not any(value.is_graph_output() for value in inside)


@dataclass(frozen=True)
class Fusion:
    """A pattern and its replacement.

    Args:
        results: Outputs of the pattern. Matching goes backwards from them; the first is searched in graph order.
        replace: Adds nodes to the match and returns a value for each result, which gets its name and readers.
        where: Must accept the whole match.
        at: New nodes replace this node; None: the node of the first result.
        alone: Match only if nothing else reads inner values; otherwise such values stay for their readers.
    """

    results: tuple[Op | Result, ...]
    replace: Callable[[Match], Sequence[ir.Value]]
    where: Callable[[Match], bool] = field(default=lambda match: True)
    at: Op | None = None
    alone: bool = True

    def match(self, graph: ir.Graph, root: ir.Node) -> Match | None:
        """The match whose first result comes from `root`; None if there is none or it must not be fused."""
        matches = (Match(found, self.results) for found in _found(graph, self.results, root, {}))
        return next((match for match in matches if (not self.alone or match.closed()) and self.where(match)), None)

    def apply(self, graph: ir.Graph, match: Match) -> None:
        """Replace the nodes of the pattern by the new ones."""
        new = self.replace(match)
        graph.insert_before(match.node(self.at or _result(self.results[0]).of), match.new)
        for old, value in zip(match.results, new, strict=True):
            put_in_place(old, value)
        if self.alone:
            graph.remove(match.gone, safe=True)
        for domain, op in {(node.domain, node.op_type) for node in match.new if node.domain}:
            graph.opset_imports[domain] = OPS[op].version if domain == DOMAIN else 1


def fuse(model: ir.Model, *fusions: Fusion) -> int:
    """Replace matches in the main graph, in place, one fusion after the other, and return their number."""
    graph, count = model.graph, 0
    for fusion in fusions:
        for root in list(graph):
            match = fusion.match(graph, root) if root.graph is graph else None
            if match is not None:
                fusion.apply(graph, match)
                count += 1
    if count:
        graph.sort()  # a result may have readers before other inputs of its pattern
        drop_unused(graph)
    return count


def fused(*fusions: Fusion) -> Callable[[ir.Model], str]:
    """The condition that no match of the patterns is left."""

    def check(model: ir.Model) -> str:
        left = next((node for node in model.graph for fusion in fusions if fusion.match(model.graph, node)), None)
        return f"nodes up to {left.name or left.op_type} that could be one" if left is not None else ""

    return check


def fusing(name: str, reason: str, *fusions: Fusion) -> Pass:
    """A pipeline's pass `name`, which runs `fuse`; results keep their names."""

    def run(model: ir.Model) -> int:
        return fuse(model, *fusions)

    run.__name__ = name
    return Pass(run, reason, requires=no_functions, ensures=fused(*fusions))


def _result(pattern: Op | Result) -> Result:
    return pattern if isinstance(pattern, Result) else pattern[0]


def _found(graph: ir.Graph, results: Sequence[Op | Result], root: ir.Node, found: Found) -> Iterator[Found]:
    """Matches with `root` as the node of the first result, and any nodes for the others."""
    for bound in _node(_result(results[0]).of, root, found):
        rest = [result for result in results[1:] if _result(result).of not in bound]
        nodes = [node for node in graph if node.op_type in _result(rest[0]).of.ops] if rest else []
        yield from (more for node in nodes for more in _found(graph, rest, node, bound)) if rest else (bound,)


def _node(pattern: Op, node: ir.Node, found: Found) -> Iterator[Found]:
    """Ways in which `node` matches."""
    inputs = list(node.inputs)
    while inputs and inputs[-1] is None:
        inputs.pop()
    if pattern in found:
        yield from [found] if found[pattern] is node else []
    # Two parts of a pattern match different nodes.
    elif pattern.takes(node, inputs) and (pattern.shared or not any(node is other for other in found.values())):
        for order in [inputs, inputs[::-1]] if node.op_type in COMMUTES else [inputs]:
            yield from _values(pattern.inputs, order, {**found, pattern: node})


def _values(patterns: Sequence[Pattern], values: Sequence[ir.Value | None], found: Found) -> Iterator[Found]:
    if not patterns:
        yield found
    else:
        for bound in _value(patterns[0], values[0], found):
            yield from _values(patterns[1:], values[1:], bound)


def _value(pattern: Pattern, value: ir.Value | None, found: Found) -> Iterator[Found]:
    if pattern is None or value is None:
        yield from [found] if pattern is value else []
    elif isinstance(pattern, Either):
        yield from (bound for option in pattern for bound in _value(option, value, found))
    elif isinstance(pattern, Val):
        yield from [{**found, pattern: value}] if found.get(pattern, value) is value and pattern.check(value) else []
    else:
        of, index = _result(pattern)
        maker = value.producer()
        yield from _node(of, maker, found) if maker is not None and value.index() == index else []
