"""No program of this project lets ONNX Runtime report: nothing but its own output appears under a new home folder."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.still_export.conftest import Exporter

IDS = ["--prompt-ids", "5,6,7", "--tokens", "2"]
PROGRAMS = {
    "the package": ["-c", "import still_export, onnxruntime"],
    "a module of it": ["-c", "import still_export.proof.judge, onnxruntime"],
    "benchmarks": ["-m", "tools.benchmarks.ort_ops", "-h"],
    "run": ["-m", "still_export.cli.main", "run", "PACKAGE", *IDS],
    "run_ort.py": ["PACKAGE/run_ort.py", *IDS],
    "the example": [str(ROOT / "examples/onnxruntime_greedy.py"), "PACKAGE", "2", "5", "6"],
}


def files_of(words: list[str], home: Path, **more: str) -> set[str]:
    """Names of the files that a Python program with these words leaves in a new home folder."""
    names = ("HOME", "ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    home.mkdir()
    environment |= {"HOME": str(home), "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *sys.path[1:]))), **more}
    subprocess.run([sys.executable, *words], env=environment, cwd=ROOT, check=True, capture_output=True)
    return {path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_new_home_stays_empty(program: str, export_tiny: Exporter, tmp_path: Path) -> None:
    package = str(export_tiny().path)
    assert not files_of([word.replace("PACKAGE", package) for word in PROGRAMS[program]], tmp_path / "home")


@pytest.mark.parametrize("said", [None, "0", "1"])
def test_the_environment_of_the_user_counts(said: str | None) -> None:
    """Whether ONNX Runtime then writes depends on the machine; what it reads is this variable."""
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *sys.path[1:])))} | (
        {} if said is None else {"ORT_DISABLE_TELEMETRY": said}
    )
    words = [sys.executable, "-c", "import still_export, os; print(os.environ['ORT_DISABLE_TELEMETRY'])"]
    found = subprocess.run(words, env=environment, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    assert found == (said or "1")


def first(tree: ast.Module, word: str) -> int:
    """The index of the first statement of a module that has `word`; the end, if none has it."""
    return next((at for at, node in enumerate(tree.body) if word in ast.unparse(node)), len(tree.body))


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_turn_it_off_before_they_import(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = first(tree, "import onnxruntime")
    assert imported == len(tree.body) or first(tree, "ORT_DISABLE_TELEMETRY") < imported
