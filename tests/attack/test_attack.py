"""A few of the attacks of tests/attack; its own command line runs thousands."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("peft")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    [
        ["damage", "--count", "6"],
        ["serve", "--count", "3"],
        pytest.param(["kills", "--count", "2"], marks=pytest.mark.long),
    ],
    ids=["damage", "serve", "kills"],
)
def test_a_few(attack: list[str], tmp_path: Path) -> None:
    """Each damaged input ends in an answer or in one line; each kill leaves what was there, and nothing after the next run."""
    command = [sys.executable, "tests/attack", *attack, "--seed", "7", "--work", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
