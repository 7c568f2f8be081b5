"""The rooms of still_export by floors, from the imports in its sources: who imports upwards, and in a circle.

    python -m tests.floors [CHECKOUT]

prints the rooms of the three packages with their lines, arrows up and cycles, as docs/notebook has them.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import networkx

from still_export.proof.op_sources import imports

ROOT = Path(__file__).parents[1]
PACKAGES = {"still_export": ".", "still_kernels": "kernels", "still_graphs": "graphs"}

FLOORS = (
    ("errors", "extras", "version"),
    ("fields", "discovery"),
    ("options",),
    ("package",),
    ("sources", "gguf", "runtime"),
    ("folders",),
    ("mixers",),
    ("models",),
    ("systems",),
    ("texts",),
    ("linearization", "graph"),
    ("targets",),
    ("loading", "engines"),
    ("proof",),
    ("evaluation", "serving", "doctor"),
    ("report",),
    ("auto_classes", "api"),
    ("still_export",),
    ("cli",),
)
"""Rooms of still_export from the ground up; each imports rooms of lower floors alone, and none of its own. "still_export" is its
`__init__`."""

NEVER = (
    (("graph", "targets"), ("runtime", "serving", "loading", "engines", "linearization")),
    (("runtime", "serving"), ("models", "systems", "graph", "targets", "linearization")),
    (("evaluation",), ("linearization",)),
)
"""What floors alone allow: export never imports run or train, run never models, export or train, measure never train."""
PLUGGED = "still_export.serving.vllm"
"""vLLM's runner reads model folders itself: this room is models in another's runtime."""


@dataclass(frozen=True, order=True)
class Arrow:
    """File `source` of a package imports the module `target` of it."""

    source: str
    target: str


class Sources:
    """The files of a package by module.

    Args:
        folder: Of the package.
    """

    def __init__(self, folder: Path) -> None:
        self.name, self.files = folder.name, {}
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            self.files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path

    def room(self, module: str) -> str:
        """The first folder or file below the package; the package itself for its `__init__`."""
        return f"{module}.{module}".split(".")[1]

    @cached_property
    def arrows(self) -> list[Arrow]:
        """Who imports whom."""
        found = set()
        for module, path in self.files.items():
            found |= {
                Arrow(module, name) for name in map(self._file, imports(path, PACKAGES)) if name and name != module
            }
        return sorted(found)

    def _file(self, name: str) -> str | None:
        """The module that a dotted name is, or is in."""
        while name and name not in self.files:
            name = name.rpartition(".")[0]
        return name or None

    def up(self) -> list[Arrow]:
        """Arrows to a room of the same floor or a higher one."""
        floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
        pairs = [(arrow, self.room(arrow.source), self.room(arrow.target)) for arrow in self.arrows]
        return [arrow for arrow, room, other in pairs if room != other and floor[other] >= floor[room]]

    def never(self) -> list[Arrow]:
        """Arrows that NEVER has."""
        pairs = {(room, other) for rooms, others in NEVER for room in rooms for other in others}
        own = [arrow for arrow in self.arrows if not arrow.source.startswith(PLUGGED)]
        return [arrow for arrow in own if (self.room(arrow.source), self.room(arrow.target)) in pairs]

    def cycles(self, rooms: bool = False) -> list[list[str]]:
        """Modules, or rooms, that import one another in a circle."""
        graph = networkx.DiGraph((arrow.source, arrow.target) for arrow in self.arrows)
        if rooms:
            pairs = ((self.room(a.source), self.room(a.target)) for a in self.arrows)
            graph = networkx.DiGraph(pair for pair in pairs if pair[0] != pair[1])
        return sorted(sorted(part) for part in networkx.strongly_connected_components(graph) if len(part) > 1)


def write_package(root: Path, texts: Mapping[str, str]) -> None:
    """Files of a package by their path in it, for tests of what is found there."""
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def lines_of(path: Path) -> tuple[int, int]:
    """Lines of a file, and of those the ones with code: no blank ones, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            used |= set(range(token.start[0], token.end[0] + 1)) if token.string else set()
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(text.splitlines()), len(used - prose)


def main(root: Path) -> None:
    """Print the tables."""
    for name, place in PACKAGES.items():
        sources = Sources(root / place / name)
        counted: dict[str, list[tuple[int, int]]] = {}
        for module, path in sources.files.items():
            counted.setdefault(sources.room(module), []).append(lines_of(path))
        order = [room for rooms in FLOORS for room in rooms if room in counted]
        known = name == "still_export"
        print(f"\n| {name} | files | lines | of code |\n|---|---|---|---|")
        for room in [*(order if known else ()), *sorted(set(counted) - set(order if known else ()))]:
            whole, code = (sum(each) for each in zip(*counted[room], strict=True))
            print(f"| {room} | {len(counted[room])} | {whole:,} | {code:,} |")
        total = [sum(each) for each in zip(*(pair for pairs in counted.values() for pair in pairs), strict=True)]
        print(f"| together | {len(sources.files)} | {total[0]:,} | {total[1]:,} |\n")
        if known and set(counted) <= set(order):
            print("arrows up:", ", ".join(f"{a.source} -> {a.target}" for a in sources.up()) or "none")
        print("rooms in cycles:", "; ".join(", ".join(part) for part in sources.cycles(rooms=True)) or "none")
        print("files in cycles:", "; ".join(f"{len(part)}: {', '.join(part)}" for part in sources.cycles()) or "none")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
