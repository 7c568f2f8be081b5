"""Expressions of a launch plan: Python syntax for a few operators, checked once, stored as prefix lists.

An expression is an integer, a text or a real number:

    ceil_div(T, C) + 1              integers: + - * // % min max ceil_div pow2, and / or / not, comparisons (1 or 0), a if c else b
    kind == 'error'                 texts compare with == and !=, or `kind in ('relu', 'elu')`
    has(gate)   dim(weight, 0)      whether the call has a tensor; one dimension of it
    rsqrt(D)                        1 / sqrt of an integer: a real number, like a float attribute; reals can be compared and chosen

A name is, in this order, a defined value, a dimension of the op ("B"), an attribute, a constant of the compiled variant, or one
of `CALL`. As data (for the archive's index and plugins/core) an expression is an integer or a list that begins with its operator:
["+", ["size", "B"], 1]. Integers have 64 bits; overflow and division by a non-positive number are errors.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from still_graphs.errors import ConfigError
from still_graphs.ops import OpSpec
from still_graphs.spec import dimension

CALL = {"tokens": "integer", "rows": "integer", "dtype": "text", "count_dtype": "text"}
"""Names available in every call: tokens of all sequences, rows of the state, types of activations and of counts."""
DEPTH = 24
NODES = 256
"""Limits of one expression, equal to those of plugins/core."""

Data = int | list[Any]
Environment = dict[str, Any]
_BINARY = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}
_COMPARE = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_SOURCE = {
    **{operator: f"({{0}} {operator} {{1}})" for operator in ("+", "-", "*", "//", "%")},
    **{operator: f"int({{0}} {operator} {{1}})" for operator in _COMPARE.values()},
    "and": "int(bool({0}) and bool({1}))",
    "or": "int(bool({0}) or bool({1}))",
    "not": "int(not {0})",
    "min": "min({0}, {1})",
    "max": "max({0}, {1})",
    "ceil_div": "(-(-{0} // {1}))",
    "pow2": "_pow2({0})",
    "rsqrt": "_rsqrt({0})",
    "if": "({1} if {0} else {2})",
}


def _pow2(n: int) -> int:
    """The smallest power of two that is at least n, at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def _rsqrt(n: int) -> float:
    return float(n) ** -0.5


def symbols(spec: OpSpec) -> list[str]:
    """Dimension symbols of an op, in the order of their first use: "C" for a dimension "2*C"."""
    shapes = (tensor.shape for tensor in (*spec.all_inputs(), *spec.outputs))
    return list(dict.fromkeys(dimension(dim)[1] for shape in shapes for dim in shape if isinstance(dim, str)))


@dataclass
class Scope:
    """The names available to an expression, with their types."""

    spec: OpSpec
    constants: tuple[str, ...] = ()
    values: dict[str, str] = field(default_factory=dict)  # defined names and their types

    def define(self, name: str, kind: str) -> None:
        """Add a name; ConfigError if it is taken."""
        if not name.isidentifier():
            raise ConfigError(f"plan of {self.spec.name}: {name!r} is no name.")
        if self.find(name) is not None:
            raise ConfigError(f"plan of {self.spec.name}: the name {name} is taken.")
        self.values[name] = kind

    def find(self, name: str) -> tuple[Data, str] | None:
        """Data and type of a name; None if unknown."""
        if name in self.values:
            return ["value", name], self.values[name]
        if name in symbols(self.spec):
            return ["size", name], "integer"
        for attribute in self.spec.attributes:
            if attribute.name == name:
                return ["attribute", name], {int: "integer", float: "real", str: "text"}[type(attribute.default)]
        if name in self.constants:
            return ["constant", name], "integer"
        return (["call", name], CALL[name]) if name in CALL else None

    def tensors(self) -> set[str]:
        """Names of tensors in kernels: a present state has its plain name, unless an input has that."""
        every = {tensor.name for tensor in (*self.spec.all_inputs(), *self.spec.outputs)}
        return every | {f"present_{state.name}" for state in self.spec.states}


@dataclass(frozen=True)
class Expression:
    """A checked expression. `kind` is "integer", "text" or "real"."""

    text: str
    data: Data
    kind: str
    run: Callable[[Environment], Any] = field(compare=False)

    def __call__(self, environment: Environment) -> Any:
        """The value in `environment` (`Call.environment`)."""
        return self.run(environment)


def compile_expression(text: str | int, scope: Scope, kind: str = "integer") -> Expression:
    """Check one expression.

    Args:
        kind: Required type; "real" accepts integers too, "any" accepts all.

    Raises:
        ConfigError: Syntax error, unknown name, or types that do not match.
    """
    where = f"plan of {scope.spec.name}: {text!r}"
    try:
        tree = ast.parse(str(text).strip(), mode="eval").body
    except SyntaxError as error:
        raise ConfigError(f"{where} is no expression.") from error
    data, found = _Reader(scope, where).read(tree)
    if kind not in ("any", found) and (kind, found) != ("real", "integer"):
        raise ConfigError(f"{where} is of type {found}; {kind} is needed.")
    if _depth(data) > DEPTH or _count(data) > NODES:
        raise ConfigError(f"{where} is larger than an expression may be. Define parts of it.")
    code = compile(f"lambda e: {_source(data)}", f"<{text}>", "eval")
    return Expression(str(text), data, found, eval(code, {"_pow2": _pow2, "_rsqrt": _rsqrt}))  # _source wrote the code


def leaves(data: Data) -> Iterator[list[Any]]:
    """Names in an expression, as data: ["size", "B"]."""
    if isinstance(data, list):
        if data[0] in _SOURCE:
            for part in data[1:]:
                yield from leaves(part)
        elif data[0] != "text":
            yield data


class _Reader:
    """Converts Python's syntax tree to data and type."""

    def __init__(self, scope: Scope, where: str) -> None:
        self.scope, self.where = scope, where

    def fail(self, why: str) -> ConfigError:
        return ConfigError(f"{self.where}: {why}")

    def read(self, node: ast.expr) -> tuple[Data, str]:
        match node:
            case ast.Constant(value=bool()):
                pass
            case ast.Constant(value=int(value)):
                return value, "integer"
            case ast.Constant(value=str(value)):
                return ["text", value], "text"
            case ast.Name(id=name):
                found = self.scope.find(name)
                if found is None:
                    raise self.fail(f"the name {name} is unknown.")
                return found
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return [_BINARY[type(op)], self.integer(left), self.integer(right)], "integer"
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return ["-", 0, self.integer(operand)], "integer"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ["not", self.integer(operand)], "integer"
            case ast.BoolOp(op=op, values=values):
                name = "and" if isinstance(op, ast.And) else "or"
                return self.fold(name, [self.integer(value) for value in values]), "integer"
            case ast.Compare(left=left, ops=ops, comparators=others):
                sides = [left, *others]
                parts = [self.compare(a, op, b) for a, op, b in zip(sides, ops, others, strict=False)]
                return self.fold("and", parts), "integer"
            case ast.IfExp(test=test, body=body, orelse=orelse):
                (first, kind), (second, other) = self.read(body), self.read(orelse)
                if kind != other and "text" in (kind, other):
                    raise self.fail(f"the two sides of `if` are of types {kind} and {other}.")
                return ["if", self.integer(test), first, second], kind if kind == other else "real"
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return self.call(name, args)
        raise self.fail("the plan's language has nothing like this.")

    def integer(self, node: ast.expr) -> Data:
        data, kind = self.read(node)
        if kind != "integer":
            raise self.fail(f"{ast.unparse(node)} is of type {kind}; integer is needed.")
        return data

    def fold(self, name: str, parts: list[Data]) -> Data:
        result = parts[-1]
        for part in reversed(parts[:-1]):
            result = [name, part, result]
        return result

    def compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Data:
        if isinstance(op, ast.In | ast.NotIn) and isinstance(right, ast.Tuple) and right.elts:
            found = self.fold("or", [self.compare(left, ast.Eq(), item) for item in right.elts])
            return ["not", found] if isinstance(op, ast.NotIn) else found
        (first, kind), (second, other) = self.read(left), self.read(right)
        name = _COMPARE.get(type(op))
        if name is None or (kind != other and "text" in (kind, other)) or (kind == "text" and name not in ("==", "!=")):
            raise self.fail(f"{ast.unparse(left)} and {ast.unparse(right)} do not compare like this.")
        return [name, first, second]

    def call(self, name: str, args: list[ast.expr]) -> tuple[Data, str]:
        if name in ("has", "dim"):
            tensor = args[0].id if args and isinstance(args[0], ast.Name) else ""
            axis = [a.value for a in args[1:] if isinstance(a, ast.Constant) and isinstance(a.value, int)]
            if (
                tensor not in self.scope.tensors()
                or len(args) != (1 if name == "has" else 2)
                or len(axis) != len(args) - 1
            ):
                raise self.fail(f"{name}() takes a tensor of the op{' and an axis' if name == 'dim' else ''}.")
            return [name, tensor, *axis], "integer"
        parts = [self.integer(argument) for argument in args]
        if name in ("min", "max") and len(parts) >= 2:
            return self.fold(name, parts), "integer"
        if name == "ceil_div" and len(parts) == 2:
            return [name, *parts], "integer"
        if name in ("pow2", "rsqrt") and len(parts) == 1:
            return [name, *parts], "real" if name == "rsqrt" else "integer"
        raise self.fail(f"no function {name} of {len(parts)} values.")


def _source(data: Data) -> str:
    if isinstance(data, int):
        return f"({data})"
    match data:
        case ["text", text]:
            return repr(text)
        case ["has", name]:
            return f"int({name!r} in e['present'])"
        case ["dim", name, axis]:
            return f"e['shapes'][{name!r}][{axis}]"
        case [kind, name] if kind in ("size", "attribute", "constant", "value", "call"):
            return f"e[{f'{kind} {name}'!r}]"
    return _SOURCE[data[0]].format(*map(_source, data[1:]))


def _depth(data: Data) -> int:
    return 1 + max(map(_depth, data[1:]), default=0) if isinstance(data, list) and data[0] in _SOURCE else 1


def _count(data: Data) -> int:
    return 1 + sum(map(_count, data[1:])) if isinstance(data, list) and data[0] in _SOURCE else 1
