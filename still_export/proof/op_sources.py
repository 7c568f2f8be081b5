"""Which code computes an op, as a hash: comments, docstrings, imports, the place of a file and the version of Python do not count.

An op's code is that of modules of its folder and of what they import of still_kernels and still_graphs, with CUDA's files; on CPUs also its
C++, with the headers that it includes. Each file is a set of statements, so a function that moves to another file changes nothing.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from still_export.targets.trt.plugins import SOURCE
from still_graphs.ops import OPS

PACKAGES = ("still_kernels", "still_graphs")
GENERIC = re.compile(r"still_graphs\.(ops|functions)|still_kernels\.registry|.*\.errors")
"""Modules that belong to no single op: their imports lead to every op, or they contain only messages."""
MODULES = {
    "cpu": re.compile(r"(spec|body)\b"),
    "cuda": re.compile(r"(spec|body|fuse\w*|plan|kernels)\b"),
    "torch": re.compile(r"(?!traced\b)"),
}
"""Modules of an op that run, with what they import: in packages for CPUs, in packages for GPUs, and where PyTorch or vLLM calls the op."""
COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
INCLUDE = re.compile(r'#\s*include\s+"([^"]+)"')

Device = Literal["cpu", "cuda", "torch"]


def op_digest(name: str, device: Device) -> str | None:
    """SHA-256 of the code of op `name` in packages for CPUs or GPUs, or in PyTorch; None: there is no such op any more."""
    if name not in OPS:
        return None
    home = OPS[name].package
    modules = _modules("still_graphs") | _modules("still_kernels") | _modules(home.partition(".")[0])
    folder = modules[home].parent
    own = [m for m in modules if m.startswith(f"{home}.") and MODULES[device].match(m.removeprefix(f"{home}."))]
    parts = {part for m in _reached(own, modules) for part in _statements(modules[m].read_text(encoding="utf-8"))}
    if device == "cpu":
        parts |= {_tokens(path) for path in _included((folder / "cpu").glob("*.*"))}
    else:
        parts |= {_tokens(path) for path in folder.rglob("*.cu")}
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def imports(path: Path, packages: Iterable[str] = PACKAGES) -> Iterator[str]:
    """Modules that a file names: in imports, nested ones too, for `importlib.import_module`, and in whole strings as "package.module" or
    "package.module:Name"; not what is under TYPE_CHECKING. `from a import b` is "a.b", whatever b is."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    types = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    skipped = {id(inner) for outer in types for part in outer.body for inner in ast.walk(part)}
    named = re.compile(rf"({'|'.join(packages)})(\.\w+)+(:\w+)?")
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and named.fullmatch(node.value):
            yield node.value.partition(":")[0]


def _reached(own: Iterable[str], modules: dict[str, Path]) -> set[str]:
    """Modules that `own` import, and these, and `own`."""
    found, todo = set(own), list(own)
    while todo:
        for name in _imported(path := modules[todo.pop()], path.read_text(encoding="utf-8")):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name and name not in found and not GENERIC.fullmatch(name):
                found.add(name)
                todo.append(name)
    return found


@cache
def _modules(package: str) -> dict[str, Path]:
    spec = find_spec(package)
    found = {}
    for root in map(Path, (spec.submodule_search_locations if spec else None) or ()):
        for path in root.rglob("*.py"):
            parts = path.relative_to(root.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def _imported(path: Path, text: str) -> list[str]:
    return list(imports(path))


@cache
def _statements(text: str) -> list[str]:
    """Statements of a module without docstrings and imports."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            statements = [n for n in body if not (isinstance(n, ast.Import | ast.ImportFrom) or _is_text(n))]
            setattr(node, "body", statements)  # noqa: B010 - of any kind of node
    return [hashlib.sha256(repr(_filled(node)).encode()).hexdigest() for node in tree.body]


def _filled(node: object) -> object:
    """A syntax tree without empty fields: newer versions of Python have more of them."""
    if isinstance(node, list):
        return [_filled(each) for each in node]
    if not isinstance(node, ast.AST):
        return node
    return type(node).__name__, {
        name: _filled(value) for name, value in ast.iter_fields(node) if value not in (None, [])
    }


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _included(paths: Iterable[Path]) -> set[Path]:
    """C++ files and the headers of this project that they include."""
    found, todo = set(), [path.resolve() for path in paths]
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            names = INCLUDE.findall(path.read_text(encoding="utf-8"))
            near = ((path.parent / name, SOURCE / name) for name in names)
            todo += [next(p for p in pair if p.is_file()).resolve() for pair in near if any(p.is_file() for p in pair)]
    return found


def _tokens(path: Path) -> str:
    """A C++ or CUDA file without comments, includes and white space."""
    text = COMMENT.sub(lambda found: found[1] or " ", path.read_text(encoding="utf-8"))
    return hashlib.sha256("".join(INCLUDE.sub("", text).split()).encode()).hexdigest()
