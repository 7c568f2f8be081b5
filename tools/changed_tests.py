"""Tests that a change can reach, one file a line; why, on stderr.

  python -m tools.changed_tests [BASE]      BASE: a commit, such as main; without one what is not committed

A test reaches the modules that it, its conftest.py and they in turn import, wherever in a file; a module that imports others by names which
it makes reaches those beside it. Folders of ops and of systems are found by name: tests that name the folder reach it. Other files are
reached through modules that name them, C++ by all tests that build it, a page by tests/docs. A change of what every test stands on
(pyproject.toml, constraints.txt, tests/conftest.py) reaches all.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = {"still_export": ".", "still_kernels": "kernels", "still_graphs": "graphs", "tests": ".", "tools": "."}
ALL = ("pyproject.toml", "constraints.txt", "setup.py", "tests/conftest.py")
NATIVE = re.compile(r"\.(cpp|cc|h|inc|S|cmake|map)$|CMakeLists\.txt$")
BUILDS = re.compile(r"\b(builds|library|kernels_cache)\b")
"""What a test names that builds C++: the module, or the fixtures of conftest.py."""
MAKES_NAMES = re.compile(r"\bimport_module\((?!\")")
BY_NAME = re.compile(r"(?:kernels/still_kernels|still_export/systems|graphs/still_graphs/functions)/(?!common/)(\w+)/")
"""Folders that registries find by their names."""


def imports(path: Path, packages: Iterable[str]) -> Iterator[str]:
    """Modules that a file imports, anywhere in it, or names in a whole string as "package.module" or "package.module:Name".

    `from a import b` is "a.b", whatever b is.
    """
    named = re.compile(rf"({'|'.join(packages)})(\.\w+)+(:\w+)?")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and named.fullmatch(node.value):
            yield node.value.partition(":")[0]


class Reach:
    """The test files of a checkout and what they reach."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.modules: dict[str, Path] = {}
        for package, place in PLACES.items():
            for path in sorted((root / place / package).rglob("*.py")):
                parts = path.relative_to(root / place).with_suffix("").parts
                self.modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self.files = {
            name: path
            for name, path in self.modules.items()
            if path.name.startswith("test_") and name.startswith("tests.")
        }
        self.texts = {name: path.read_text(encoding="utf-8") for name, path in self.modules.items()}

    @cached_property
    def arrows(self) -> dict[str, set[str]]:
        """What each module imports; a test its conftest.py, too."""
        found = {
            name: set(filter(None, map(self._module, imports(path, PLACES)))) for name, path in self.modules.items()
        }
        for name, text in self.texts.items():
            if MAKES_NAMES.search(text) and not name.startswith("tests."):
                found[name] |= {
                    other for other, path in self.modules.items() if path.parent == self.modules[name].parent
                } - {name}
        for name in self.files:
            parents = name.split(".")[:-1]
            above = (".".join([*parents[:n], "conftest"]) for n in range(1, len(parents) + 1))
            found[name] |= {conftest for conftest in above if conftest in self.modules}
        return found

    def _module(self, name: str) -> str:
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name

    def reaching(self, changed: Iterable[str]) -> dict[str, str]:
        """Test files that reach one of the changed files (paths from the root), each with the way to it."""
        names = {path.relative_to(self.root).as_posix(): name for name, path in self.modules.items()}
        found: dict[str, str] = {}
        for file in changed:
            if file in ALL:
                found |= {name: f"every test stands on {file}" for name in self.files}
            own = {names[file]} if file in names else self._naming_modules(file)
            for module in sorted(own):
                found = {**self._importing(module), **found}
            found = {**{name: f"names {word}" for name, word in self._naming(file)}, **found}
        return {self.files[name].relative_to(self.root).as_posix(): why for name, why in sorted(found.items())}

    def _importing(self, changed: str) -> dict[str, str]:
        """By the shortest way, backwards."""
        importers: dict[str, list[str]] = {}
        for source, targets in self.arrows.items():
            for target in targets:
                importers.setdefault(target, []).append(source)
        ways, todo = {changed: changed}, [changed]
        for name in todo:
            for source in importers.get(name, ()):
                if source not in ways:
                    ways[source] = f"{source} -> {ways[name]}"
                    todo.append(source)
        return {name: way for name, way in ways.items() if name in self.files}

    def _naming_modules(self, file: str) -> set[str]:
        """Of a file that is no module and no page."""
        name = re.compile(rf"(?<![\w.-]){re.escape(Path(file).name)}\b")
        return (
            {module for module, text in self.texts.items() if name.search(text)}
            if not file.endswith((".md", ".py"))
            else set()
        )

    def _naming(self, file: str) -> Iterator[tuple[str, str]]:
        words = [folder[1], folder[1].title().replace("_", "")] if (folder := BY_NAME.match(file)) else []
        asked = re.compile("|".join(rf"(?<![\w.]){re.escape(word)}\b" for word in words)) if words else None
        for name in self.files:
            own = [name, *(other for other in self.arrows[name] if other.startswith("tests."))]
            if asked and (word := next((m[0] for other in own if (m := asked.search(self.texts[other]))), "")):
                yield name, word
            elif NATIVE.search(file) and BUILDS.search(self.texts[name]):
                yield name, "what builds C++"
            elif file.endswith(".md") and name.startswith("tests.docs."):
                yield name, "pages"


def changed_files(base: str | None) -> list[str]:
    """Of this checkout: those that differ from `base`, or from the last commit, and those that git does not know."""
    asked = [
        ["git", "diff", "--name-only", *([base] if base else ["HEAD"])],
        ["git", "ls-files", "--others", "--exclude-standard"],
    ]
    lines = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout for command in asked]
    return sorted({line for text in lines for line in text.splitlines()})


def main() -> None:
    changed = changed_files(sys.argv[1] if len(sys.argv) > 1 else None)
    found = Reach().reaching(changed)
    print(f"changed: {', '.join(changed) or 'nothing'}", file=sys.stderr)
    for file, why in found.items():
        print(f"{file}: {why}", file=sys.stderr)
        print(file)


if __name__ == "__main__":
    main()
