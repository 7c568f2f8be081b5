"""A command that says nothing for long."""

from __future__ import annotations

import subprocess
import sys

from tests.docs.pages import ROOT


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ROOT / "tools/with_dots.py", *words], capture_output=True, text=True)


def test_a_silent_command_has_dots_its_time_and_its_code() -> None:
    done = run("installing", "sh", "-c", "echo out; sleep 2.2")
    assert done.returncode == 0 and done.stdout == "out\n" and done.stderr == "installing . 2 s\n"
    done = run("--hush", "trying", "sh", "-c", "echo lost >&2; exit 3")
    assert done.returncode == 3 and done.stderr == "trying  failed\n"


def test_what_installs_or_fetches_has_dots() -> None:
    for name in ("env.sh", "demo.sh"):
        for line in (ROOT / "tools" / name).read_text(encoding="utf-8").splitlines():
            silent = "pip install" in line or "$install " in line or "-m venv" in line
            assert not silent or "with_dots.py" in line or line.startswith("install=") or "$beside" in line, line
