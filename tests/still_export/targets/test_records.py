"""A target is one record: nothing else compares its name."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from still_export.errors import ConfigError
from still_export.loading.runtimes import RUNTIMES
from still_export.targets.genai.package import PASSES
from still_export.targets.registry import TARGETS, names, target_of, targets_of

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("still_export", "graphs/still_graphs", "kernels/still_kernels")
RECORDS = ("still_export/targets/",)
NAMES = {t.name for t in TARGETS} | {t.to for t in TARGETS} - {"onnx"}


def compared(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each comparison with the name of a target or of a runtime, and of each table that is asked with a runtime."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript | ast.Call) and isinstance(table := _asked(node), ast.Dict):
            keys = [key for key in table.keys if isinstance(key, ast.Constant) and key.value in RUNTIMES]
            yield from ((node.lineno, str(key.value)) for key in keys if "runtime" in ast.unparse(node))
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        names = NAMES | (set(RUNTIMES) if any("runtime" in ast.unparse(side) for side in sides) else set())
        if isinstance(node.ops[0], ast.In | ast.NotIn):
            sides = node.comparators  # "trt" in manifest asks for a key
        for side in sides:
            values = side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]
            yield from ((node.lineno, v.value) for v in values if isinstance(v, ast.Constant) and v.value in names)


def _asked(node: ast.Subscript | ast.Call) -> ast.expr:
    """What is asked: the table of `{...}[x]` and of `{...}.get(x)`."""
    if isinstance(node, ast.Subscript):
        return node.value
    return node.func.value if isinstance(node.func, ast.Attribute) else node.func


def test_no_other_file_compares_the_name_of_a_target() -> None:
    found = {}
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(RECORDS) and (places := list(compared(path.read_text(encoding="utf-8")))):
                found[name] = places
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        'x = target == "trt"',
        'x = "genai" != kind',
        'x = manifest["target"] in ("onnx", "trt-rtx")',
        'x = runtime == "ort"',
        'x = setting.runtime in ("torch", None)',
        'x = {"ort": "onnxrt"}.get(runtime, runtime)',
        'x = {"trt": "TensorRT"}[self.runtime]',
    ],
)
def test_a_comparison_is_found(line: str) -> None:
    assert list(compared(line))


def test_records_are_told_apart() -> None:
    assert len({target.name for target in TARGETS}) == len(TARGETS)
    for name in names():
        assert target_of(name).to == name
    for target in TARGETS:
        assert target in targets_of(target.name) or target.name in names()
    with pytest.raises(ConfigError, match=r"--to cloud is unknown; known: onnx, genai, web, trt, trt-rtx\."):
        targets_of("cloud")


def test_records_are_read_without_what_exports_need() -> None:
    """Verbs that build, run and verify a package read them on machines that have a runtime, and neither PyTorch nor onnx_ir."""
    code = """
import sys
sys.modules |= dict.fromkeys(("torch", "onnx_ir", "onnxscript", "onnxruntime", "transformers", "triton"))
import still_export.loading.runtimes, still_export.proof.verify
from pathlib import Path
from still_export.cli.output import next_commands
next_commands(Path(), "trt")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr[-500:]


def test_every_step_says_why_and_what_it_needs_or_leaves() -> None:
    bare = {s.name for t in TARGETS for s in (*t.passes, *PASSES) if not s.reason or not (s.requires or s.ensures)}
    assert not bare
