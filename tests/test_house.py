"""The page of rooms: what it draws and counts of a tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house import ROOT, Tree, draw, walk_row

FILES = {
    "still_export/errors.py": "",
    "still_export/low/__init__.py": "from still_export import errors\nfrom still_export.middle import one",
    "still_export/middle/one.py": "from still_export.low import two",
    "still_export/cli/main.py": """
from still_export.low import call

def main(words):
    return call(lambda: None)
""",
    "kernels/still_kernels/op.py": "",
    "graphs/still_graphs/spec.py": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Tree(tmp_path)


def test_a_circle_is_red_and_on_one_level(tree: Tree) -> None:
    assert tree.circles() == [["low", "middle"]]
    level = tree.levels()
    assert level["errors"] < level["low"] == level["middle"] < level["cli"]
    assert draw(tree).count("#c33") == 2 and draw(tree).count("<rect x=") == 4


def test_a_call_of_a_room_above_is_a_return(tree: Tree) -> None:
    down = [("still_export.cli.main", "still_export.low")]
    assert walk_row(tree, down) == "2 | 2: cli, low | 0"
    assert walk_row(
        tree, [("still_export.low", "still_kernels.op"), ("still_kernels.op", "still_graphs.spec")]
    ).endswith("| 0")
    assert walk_row(tree, [*down, ("still_export.low", "still_export.cli.main")]).endswith("| 1")


def test_a_walk_has_calls_through_other_libraries(tmp_path: Path) -> None:
    """A callback that the standard library calls is one from the file that handed it over."""
    low = "from functools import reduce\n\n\ndef call(back):\n    return reduce(lambda total, _: total or back(1) or 0, [0, 1])\n"
    for name, text in {
        "low.py": low,
        "cli/main.py": FILES["still_export/cli/main.py"].replace("lambda:", "lambda each:"),
    }.items():
        (tmp_path / "still_export" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "still_export" / name).write_text(text)
    command = [sys.executable, str(ROOT / "tests/walk.py"), str(tmp_path / "pairs.json"), "word"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True)
    pairs = json.loads((tmp_path / "pairs.json").read_text())
    assert pairs == [["still_export.cli.main", "still_export.low"], ["still_export.low", "still_export.cli.main"]]
