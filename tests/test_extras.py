"""Each extra installs what its verbs import: every import is of a dependency or of an extra, whose command an error names."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from still_export.cli.main import main
from still_export.extras import EXTRAS, installation
from tests.test_imports import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OWN = {"still_export", "still_kernels", "still_graphs"}
DISTRIBUTIONS = {
    "onnx_ir": "onnx-ir",
    "huggingface_hub": "huggingface-hub",
    "prompt_toolkit": "prompt-toolkit",
    "yaml": "pyyaml",
    "vl_convert": "vl-convert-python",
    "onnxruntime_genai": "onnxruntime-genai",
    "llama_cpp": "llama-cpp-python",
    "prometheus_client": "prometheus-client",
    "tensorrt_rtx_bindings": "tensorrt-rtx-cu13-bindings",
}
"""Of modules with another name than what pip installs."""


def distributions(requirements: list[str]) -> set[str]:
    """Names of what requirements ask for, those of other extras of this project among them."""
    found: set[str] = set()
    for requirement in requirements:
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", requirement).groups()  # type: ignore[union-attr]
        found.add(name.lower())
        for extra in extras.split(",") if name == PROJECT["name"] else ():
            found |= distributions(PROJECT["optional-dependencies"][extra])
    return found


def modules_of(path: Path) -> Iterator[str]:
    """Modules that a file imports, nested imports too, but for those under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    types = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    skipped = {id(inner) for outer in types for part in outer.body for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def imports() -> Iterator[tuple[str, str]]:
    """Modules of others that the three packages import, with a file that does."""
    for folder in ("still_export", "kernels", "graphs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for module in sorted({name.partition(".")[0] for name in modules_of(path)} - OWN - sys.stdlib_module_names):
                yield module, path.relative_to(ROOT).as_posix()


def test_every_import_is_a_dependency_or_in_an_extra() -> None:
    core = distributions(PROJECT["dependencies"])
    lacking = {
        module: path
        for module, path in imports()
        if DISTRIBUTIONS.get(module, module) not in core and not installation(module)
    }
    assert not lacking, f"imported, and neither a dependency nor in {ROOT.name}'s still_export/extras.py: {lacking}"


@pytest.mark.parametrize("extra", EXTRAS)
def test_extras_have_what_is_imported(extra: str) -> None:
    held = distributions(PROJECT["optional-dependencies"][extra])
    assert not {DISTRIBUTIONS.get(module, module) for module in EXTRAS[extra]} - held


@pytest.mark.parametrize(
    "module, extra, arguments",
    [
        ("accelerate", "train", ["linearize", "maker/BASE", "-o", "OUT"]),
        ("peft", "train", ["linearize", "maker/BASE", "--rank-layers", "-o", "OUT"]),
        ("altair", "report", ["evaluate", "maker/MODEL", "--report", "page.html"]),
        ("starlette", "serve", ["serve", "DIR"]),
    ],
)
def test_what_is_missing_is_said_before_the_work(
    module: str,
    extra: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The models of these commands are ids of none, and the package is empty, so nothing was done when the error came."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").mkdir()
    for name in [name for name in sys.modules if name.startswith("still_export.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)
    said = capsys.readouterr().err
    assert f"this needs the package {module}. Run: pip install 'still-export[{extra}]'" in said
