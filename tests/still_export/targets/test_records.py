"""A target is one record: nothing else compares its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from still_export.errors import ConfigError
from still_export.targets.registry import TARGETS, names, target_of, targets_of

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("still_export", "graphs/still_graphs", "kernels/still_kernels")
ASKING = ("still_export/targets/", "still_export/cli/")
"""Rooms of the records, and of the command line, where a flag is a target's."""
NAMES = {t.name for t in TARGETS} | {t.to for t in TARGETS} - {"onnx"}


def compared(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each comparison with a target's name; a runtime, which may be called alike, is no target."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        if any(ast.unparse(side).endswith("runtime") for side in sides):
            continue
        if isinstance(node.ops[0], ast.In | ast.NotIn):
            sides = node.comparators  # "trt" in manifest asks for a key
        for side in sides:
            values = side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]
            yield from ((node.lineno, v.value) for v in values if isinstance(v, ast.Constant) and v.value in NAMES)


def test_no_other_file_compares_the_name_of_a_target() -> None:
    found = {}
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(ASKING) and (places := list(compared(path.read_text(encoding="utf-8")))):
                found[name] = places
    assert not found


@pytest.mark.parametrize(
    "line", ['x = target == "trt"', 'x = "genai" != kind', 'x = manifest["target"] in ("onnx", "trt-rtx")']
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
