"""The arrows of the architecture: still_export -> still_kernels -> still_graphs, and what must load without what."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "still_graphs": (ROOT / "graphs" / "still_graphs", {"torch", "tensorrt", "still_kernels", "still_export"}),
    "still_kernels": (ROOT / "kernels" / "still_kernels", {"tensorrt", "still_export"}),
}


def imported(path: Path) -> set[str]:
    """Top-level names of every import statement in a file, those inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    folder, forbidden = PACKAGES[package]
    wrong = {str(p.relative_to(ROOT)): found for p in folder.rglob("*.py") if (found := imported(p) & forbidden)}
    assert not wrong


def test_runners_know_no_model_and_no_sibling_runtime() -> None:
    runners = ROOT / "still_export" / "runners"
    for name in ("ort.py", "tensorrt.py"):
        if (runners / name).exists():
            assert not imported(runners / name) & {"torch", "transformers"}, name


@pytest.mark.parametrize(
    "module, absent",
    [
        ("still_graphs.ops", ["torch", "onnx", "numpy"]),
        ("still_graphs.functions", ["torch", "onnxruntime"]),
        ("still_kernels.hybrid_attention", ["triton", "onnx", "transformers"]),
        ("still_export.models.load", ["onnx", "onnxruntime", "triton", "tensorrt"]),
        ("still_export.cli.main", ["torch", "transformers", "onnx", "onnxruntime"]),
        ("still_export.runners.ort", ["torch", "transformers", "onnx"]),
    ],
)
def test_loads_without(module: str, absent: list[str]) -> None:
    """Optional libraries load inside the function that needs them."""
    program = f"import sys; sys.modules.update(dict.fromkeys({absent!r})); import {module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-800:]


def test_no_room_but_the_op_knows_its_name() -> None:
    """Generic files speak of ops through the OpSpec, so that another op touches none of them."""
    for name in (
        "still_export/export/lower.py",
        "graphs/still_graphs/passes/attach_functions.py",
        "still_export/package/folder.py",
    ):
        assert "HYBRID_ATTENTION" not in (ROOT / name).read_text(encoding="utf-8"), name
