"""Runs a file of cases in Triton's interpreter, which must be chosen before Triton is imported: in forks of one process that has
imported torch and Triton, which takes longer than many a case."""

from __future__ import annotations

import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 1200
"""A file of cases that takes longer is ended."""


@functools.cache
def run_cases(script: Path, names: tuple[str, ...] = (), kind: str = "") -> dict[str, Any]:
    """What the cases print, by name.

    Args:
        script: Takes names of cases (none: all), and prints a JSON object with an entry for each.
        kind: Goes before the names; "": nothing does.
    """
    process = _server()
    assert process.stdin and process.stdout
    with tempfile.TemporaryDirectory() as folder:
        json.dump([str(script), *([kind] if kind else []), *names, folder], process.stdin)
        process.stdin.write("\n")
        process.stdin.flush()
        status = process.stdout.readline().strip()
        assert status == "0", f"{status}: {Path(folder, 'err').read_text()[-3000:]}"
        found: dict[str, Any] = json.loads(Path(folder, "out").read_text())
        return found


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that forks; it ends with this one, whose end closes its input."""
    roots = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "graphs"))  # this tree, whatever is installed
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": roots,
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-W", "ignore", "-m", "tests.still_kernels.interpreted"]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def serve() -> None:
    """For each line [script, arguments ..., folder] run the script in a fork, with its output in the folder; print the exit status."""
    import torch  # noqa: F401
    import triton.language  # noqa: F401

    for line in sys.stdin:
        script, *arguments, folder = json.loads(line)
        if child := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        signal.alarm(SECONDS)
        for number, name in ((0, os.devnull), (1, f"{folder}/out"), (2, f"{folder}/err")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
        sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
        status = 1
        try:
            runpy.run_path(script, run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


if __name__ == "__main__":
    serve()
