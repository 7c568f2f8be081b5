"""Floors: in a package every file imports only files below it, so that no imports form a cycle.

Imports are derived from the sources: statements, those inside functions too; names of modules in strings ("package.module",
"package.module:Name"); and names that are put together ("package.{op}.op" stands for every module that it fits). What is imported for
type checkers alone does not count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"still_graphs": ROOT / "graphs/still_graphs", "still_kernels": ROOT / "kernels/still_kernels"}
NAME = r"[A-Za-z_]\w*"


def modules_of(folder: Path) -> dict[str, str]:
    """Sources by the name of their module."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def named(source: str, package: str) -> Iterator[str]:
    """Patterns of the modules that a source names."""
    tree = ast.parse(source)
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typed:
            continue
        match node:
            case ast.Import(names=names):
                yield from (re.escape(alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield re.escape(module)
                yield from (re.escape(f"{module}.{alias.name}") for alias in names)
            case ast.Constant(value=str(text)) if re.fullmatch(rf"{package}(\.{NAME})+(:{NAME})?", text):
                yield re.escape(text.partition(":")[0])
            case ast.JoinedStr(values=[ast.Constant(value=str(first)), *_]) if first.startswith(f"{package}."):
                parts = (re.escape(p.value) if isinstance(p, ast.Constant) else r"\w+" for p in node.values)
                yield "".join(parts).partition(":")[0]


def imports(modules: Mapping[str, str], package: str) -> dict[str, set[str]]:
    """By module, those of the package that it imports."""
    every = " ".join(modules)
    return {
        module: {
            other
            for pattern in set(named(source, package))
            for other in re.findall(rf"(?<!\S){pattern}(?!\S)", every)
            if other not in (module, package)
        }
        for module, source in modules.items()
        if module != package
    }


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, by whatever way."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        left = [start]
        while left:
            new = graph.get(left.pop(), set()) - found
            found |= new
            left += new
        return found

    below = {module: reached(module) for module in graph}
    rings = {frozenset(m for m in below[module] if module in below[m]) for module in graph if module in below[module]}
    return sorted(sorted(ring) for ring in rings)


def rooms(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The same of the folders and modules right below the package."""
    found: dict[str, set[str]] = {}
    for module, others in graph.items():
        own = module.split(".")[1]
        found.setdefault(own, set()).update({other.split(".")[1] for other in others} - {own})
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_imports_form_a_cycle(package: str) -> None:
    graph = imports(modules_of(PACKAGES[package]), package)
    assert not cycles(graph)
    assert not cycles(rooms(graph))


def test_every_way_to_import_is_seen() -> None:
    """The test above can fail: one ring by a statement in a function, a string and a name that is put together; none for types alone."""
    sources = {
        "p": "",
        "p.above": "def f():\n    from p.room import low",
        "p.room.low": "PLACE = 'p.room.other:KERNELS'",
        "p.room.other": "place = lambda op: f'p.{op}'",
        "p.apart": "if TYPE_CHECKING:\n    from p.above import f",
    }
    graph = imports(sources, "p")
    assert graph["p.above"] == {"p.room.low"} and graph["p.room.low"] == {"p.room.other"}
    assert graph["p.room.other"] == {"p.above", "p.apart"} and not graph["p.apart"]
    assert cycles(graph) == [["p.above", "p.room.low", "p.room.other"]]
    assert cycles(rooms(graph)) == [["above", "room"]]
