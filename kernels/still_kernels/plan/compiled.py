"""A plan with checked expressions: evaluated for a call, or as data for the archive's index."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from still_graphs.errors import ConfigError
from still_kernels.plan.expressions import Environment, Expression, Scope, compile_expression, symbols
from still_kernels.plan.parts import (
    ELEMENTS,
    MAX_STEPS,
    NESTING,
    Branch,
    Buffer,
    Check,
    Launch,
    Launched,
    Launches,
    Let,
    Loop,
    PlanParts,
    Region,
    Step,
)

Rule = tuple[Expression, list[str | Expression]]
"""A condition and the parts of its message."""


@dataclass(frozen=True)
class _Region:
    name: str
    element: Expression
    shape: tuple[Expression, ...]
    when: Expression

    def data(self) -> dict[str, Any]:
        shape = [dim.data for dim in self.shape]
        return {"name": self.name, "element": self.element.data, "shape": shape, "when": self.when.data}


class Compiled:
    """A plan with checked expressions; made once by `Plan.compiled`."""

    def __init__(self, plan: PlanParts) -> None:
        scope = Scope(plan.spec)
        self.plan = plan
        self.key = {name: compile_expression(text, scope, "any") for name, text in plan.key.items()}
        self.checks = self.compile_checks(plan.checks)
        scope.constants = plan.constants
        taken = {*symbols(plan.spec), *(attribute.name for attribute in plan.spec.attributes)} & set(plan.constants)
        if taken:
            raise ConfigError(f"plan of {plan.spec.name}: constants have names that are taken: {', '.join(taken)}.")
        self.define: dict[str, Expression] = {}
        for name, text in plan.define.items():
            self.define[name] = compile_expression(text, scope, "any")
            scope.define(name, self.define[name].kind)
        self.measured = [compile_expression(text, Scope(plan.spec, plan.constants)) for text in plan.measured_tokens]
        self.arguments = {name: compile_expression(text, scope, "real") for name, text in plan.arguments.items()}
        types = {name: compile_expression(text, scope, "text") for name, text in plan.types.items()}
        types |= {name: compile_expression(repr(name), scope, "text") for name in ELEMENTS}
        types["T"] = compile_expression("dtype", scope, "text")
        self.workspace = [self._region(region, types, scope) for region in plan.workspace]
        self.persistent = [self._region(region, types, scope) for region in plan.persistent]
        self.aliases = [(alias, compile_expression(alias.when, scope)) for alias in plan.aliases]
        self.matrices = {
            matrix.tensor: (compile_expression(matrix.rows, scope), compile_expression(matrix.columns, scope))
            for matrix in plan.matrices
        }
        self.steps = self._steps(plan.steps, scope, 0)

    def compile_checks(self, checks: Sequence[Check]) -> list[Rule]:
        """Compile conditions and messages of checks."""
        scope = Scope(self.plan.spec)
        return [(compile_expression(check.condition, scope), self._message(check.message, scope)) for check in checks]

    @staticmethod
    def failures(rules: Sequence[Rule], env: Environment) -> Iterator[str]:
        """Messages of failed checks, in order."""
        for condition, message in rules:
            if not condition(env):
                yield "".join(part if isinstance(part, str) else str(part(env)) for part in message)

    def _message(self, text: str, scope: Scope) -> list[str | Expression]:
        parts: list[str | Expression] = []
        for literal, expression, _, _ in string.Formatter().parse(text):
            parts += [literal] if literal else []
            parts += [compile_expression(expression, scope, "any")] if expression else []
        return parts

    def _region(self, region: Region, types: Mapping[str, Expression], scope: Scope) -> _Region:
        if region.element not in types:
            raise ConfigError(
                f"plan of {self.plan.spec.name}: region {region.name} has the unknown type {region.element}."
            )
        shape = tuple(compile_expression(dim, scope) for dim in region.shape)
        return _Region(region.name, types[region.element], shape, compile_expression(region.when, scope))

    def _steps(self, steps: Sequence[Step], scope: Scope, depth: int) -> list[Any]:
        """Compile steps into tuples that begin with the kind of the step."""
        if depth > NESTING:
            raise ConfigError(f"plan of {self.plan.spec.name}: loops and branches are nested deeper than {NESTING}.")
        inner = Scope(scope.spec, scope.constants, dict(scope.values))
        result: list[Any] = []
        for step in steps:
            match step:
                case Launch(kernel, grid, arguments):
                    own = {name: compile_expression(text, inner) for name, text in arguments.items()}
                    result.append(("launch", kernel, [compile_expression(size, inner) for size in grid], own))
                case Let(name, value):
                    found = compile_expression(value, inner, "any")
                    inner.define(name, found.kind)
                    result.append(("let", name, found))
                case Loop(name, start, stop, stride, body):
                    bounds = [compile_expression(text, inner) for text in (start, stop, stride)]
                    within = Scope(scope.spec, scope.constants, dict(inner.values))
                    within.define(name, "integer")
                    result.append(("loop", name, bounds, self._steps(body, within, depth + 1)))
                case Branch(condition, then, otherwise):
                    bodies = [self._steps(body, inner, depth + 1) for body in (then, otherwise)]
                    result.append(("if", compile_expression(condition, inner), *bodies))
        return result

    def data(self) -> dict[str, Any]:
        """Data for the index; see docs/reference/plan.md."""
        return {
            "constants": list(self.plan.constants),
            "key": {name: value.data for name, value in self.key.items()},
            "checks": [
                {
                    "condition": condition.data,
                    "message": [p if isinstance(p, str) else {"value": p.data} for p in message],
                }
                for condition, message in self.checks
            ],
            "define": [[name, value.data] for name, value in self.define.items()],
            "arguments": {name: value.data for name, value in self.arguments.items()},
            "workspace": [region.data() for region in self.workspace],
            "persistent": [region.data() for region in self.persistent],
            "aliases": [{"name": a.name, "tensor": a.tensor, "when": when.data} for a, when in self.aliases],
            "matrices": [
                {"tensor": name, "rows": rows.data, "columns": columns.data}
                for name, (rows, columns) in self.matrices.items()
            ],
            "measured_tokens": [value.data for value in self.measured],
            "steps": _data(self.steps),
        }

    def evaluate(self, env: Environment) -> Launches:
        if env["size B"] == 0 or env["size T"] == 0 or env["call tokens"] == 0:
            return Launches()
        for name, value in self.define.items():
            env[f"value {name}"] = value(env)
        steps: list[Launched] = []
        self._run(self.steps, env, steps)
        return Launches(
            self.regions(self.workspace, env),
            self.regions(self.persistent, env),
            {alias.name: alias.tensor for alias, when in self.aliases if when(env)},
            {name: value(env) for name, value in self.arguments.items()},
            {name: (rows(env), columns(env)) for name, (rows, columns) in self.matrices.items()},
            tuple(steps),
        )

    def regions(self, regions: Sequence[_Region], env: Environment) -> tuple[Buffer, ...]:
        """Regions whose condition is true."""
        found = tuple(
            Buffer(region.name, region.element(env), tuple(dim(env) for dim in region.shape))
            for region in regions
            if region.when(env)
        )
        if len({buffer.name for buffer in found}) != len(found):
            raise ConfigError(f"plan of {self.plan.spec.name}: a region exists twice: {found}.")
        return found

    def _run(self, steps: Sequence[Any], env: Environment, made: list[Launched]) -> None:
        for kind, *what in steps:
            match kind:
                case "launch":
                    name, grid, arguments = what
                    x, y, z = (size(env) for size in grid)
                    if x and y and z:
                        made.append(Launched(name, (x, y, z), {n: value(env) for n, value in arguments.items()}))
                case "let":
                    env[f"value {what[0]}"] = what[1](env)
                case "loop":
                    name, bounds, body = what
                    for value in range(*(bound(env) for bound in bounds)):
                        env[f"value {name}"] = value
                        self._run(body, env, made)
                        if len(made) > MAX_STEPS:
                            raise ConfigError(
                                f"plan of {self.plan.spec.name}: more than {MAX_STEPS} steps. Split the call."
                            )
                case "if":
                    self._run(what[1] if what[0](env) else what[2], env, made)


def _data(steps: Sequence[Any]) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    for kind, *what in steps:
        match kind:
            case "launch":
                arguments = {name: value.data for name, value in what[2].items()}
                result.append({"launch": what[0], "grid": [size.data for size in what[1]], "arguments": arguments})
            case "let":
                result.append({"let": what[0], "value": what[1].data})
            case "loop":
                bounds = dict(zip(("start", "stop", "step"), (bound.data for bound in what[1]), strict=True))
                result.append({"loop": what[0], **bounds, "body": _data(what[2])})
            case "if":
                result.append({"if": what[0].data, "then": _data(what[1]), "else": _data(what[2])})
    return result
