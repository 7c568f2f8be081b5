"""A package's programs on the oldest Python and on Windows, which are rarely here: types and names of their standard library."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from still_export.package.programs import RUNNERS, write_programs

OLDEST = "3.10"
"""Of JetPack 6."""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")
def test_the_oldest_python_and_windows_have_what_they_use(tmp_path: Path) -> None:
    write_programs(tmp_path, list(RUNNERS))
    here = ["--python-version", OLDEST, "--platform", "win32", "--cache-dir", os.devnull]
    ways = ["--ignore-missing-imports", "--follow-imports", "silent", "--explicit-package-bases", "--no-error-summary"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    command = [sys.executable, "-m", "mypy", *here, *ways, "."]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
