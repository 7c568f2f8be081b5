"""The environment of a clone, from each shell: with pip's place taken by a program that writes down its words."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

PIP = """
import os, sys
with open("asked", "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
if "--index-url" in sys.argv:
    sys.exit("no network")
"""
FILES = (
    "tools/env.sh",
    "tools/environment.py",
    "tools/with_dots.py",
    "pyproject.toml",
    "constraints.txt",
    "setup.py",
    "still_export/version.py",
)
DRIVER = pytest.mark.skipif(
    Path("/proc/driver/nvidia/version").exists() or bool(shutil.which("nvidia-smi")),
    reason="with an NVIDIA driver the usual build of PyTorch is installed, from the usual index",
)
SHELLS = [shell for shell in ("bash", "zsh", "dash", "fish") if shutil.which(shell)]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "pip.py").write_text(PIP)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(os.path.realpath(sys.executable))
    return tmp_path


def typed(shell: str, line: str, place: Path) -> subprocess.CompletedProcess[str]:
    """A line that a user types into a shell."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"SHELL": shutil.which(shell) or shell, "PYTHON": sys.executable}
    return subprocess.run([shell, "-c", line], cwd=place, env=environment, capture_output=True, text=True)


def asked(clone: Path) -> list[str]:
    """What pip was asked since the last time."""
    lines = (clone / "asked").read_text().splitlines() if (clone / "asked").exists() else []
    (clone / "asked").unlink(missing_ok=True)
    return lines


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_runs_it_and_is_told_how_to_enter(shell: str, clone: Path) -> None:
    (clone / "below").mkdir()
    for line in ("bash tools/env.sh cpu", "tools/env.sh", "cd below; bash ../tools/env.sh cpu; pwd"):
        done = typed(shell, line, clone)
        assert done.returncode == 0, done.stderr
        assert f"next: {'source' if shell == 'fish' else '.'} .venv/bin/activate" in done.stdout
        assert "failed" not in done.stderr and "Traceback" not in done.stderr
    assert done.stdout.rstrip().endswith("/below")


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shell != "fish"])  # which reads no such script
def test_sourced_it_says_what_to_type_and_moves_nobody(shell: str, clone: Path) -> None:
    done = typed(shell, '. tools/env.sh cpu; echo "$?"; pwd', clone) if shell == "bash" else typed(
        shell, '. ./tools/env.sh; echo "$?"; pwd', clone
    )  # fmt: skip
    assert "Type: bash tools/env.sh cpu" in done.stderr and not asked(clone)
    assert done.stdout.split() == ["2", str(clone.resolve())]


@DRIVER
def test_what_is_there_is_not_installed_again(clone: Path) -> None:
    def install(extras: str) -> list[str]:
        done = typed("bash", f"bash tools/env.sh {extras}", clone)
        assert done.returncode == 0, done.stderr
        return asked(clone)

    first = install("cpu")
    assert any("-e .[cpu]" in words for words in first) and any("--index-url" in words for words in first)
    assert install("cpu") == [] and install("onnx,gguf") == [] and install("demo") == []
    assert any("-e .[dev]" in words for words in install("dev"))
    assert install("cpu") == [] and install("dev") == [] and install("cpu,train") == []
    (clone / "constraints.txt").write_text("numpy==2.0\n")
    assert any("-e .[cpu]" in words for words in install("cpu"))
    assert any("-e .[dev]" in words for words in install("dev"))  # whose versions may be others now


@DRIVER
def test_another_index_is_no_failure_and_an_unknown_extra_is_one(clone: Path) -> None:
    done = typed("bash", "bash tools/env.sh cpu", clone)
    assert "cannot be reached: from the usual index" in done.stderr and "failed" not in done.stderr
    done = typed("bash", "bash tools/env.sh cuda", clone)
    assert done.returncode != 0 and "no extra 'cuda'; known: onnx, " in done.stderr
    (clone / "pip.py").write_text("raise SystemExit(3)")
    done = typed("bash", "bash tools/env.sh train", clone)
    assert done.returncode == 3 and "failed" in done.stderr and "next:" not in done.stdout


def test_an_old_python_is_named(clone: Path) -> None:
    (clone / "old").write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2\nexit 1\n')
    (clone / "old").chmod(0o755)
    done = typed("bash", f"PYTHON={clone}/old bash tools/env.sh", clone)
    assert done.returncode == 2 and "3.11 or later is needed" in done.stderr and "3.9.2" in done.stderr
