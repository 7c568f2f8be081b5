"""Runs a file of cases in Triton's interpreter, which must be chosen before Triton is imported: in processes of its own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@functools.cache
def run_cases(script: Path, names: tuple[str, ...] = (), kind: str = "", processes: int = 1) -> dict[str, Any]:
    """What the cases print, by name.

    Args:
        script: Takes names of cases (none: all), and prints a JSON object with an entry for each.
        kind: Goes before the names; "": nothing does.
        processes: Among which the names are dealt out, at most.
    """
    roots = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "graphs"))  # this tree, whatever is installed
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": roots}
    command = [sys.executable, "-W", "ignore", str(script), *([kind] if kind else [])]
    processes = min(processes, max(len(names), 1))
    started = [
        subprocess.Popen(
            [*command, *names[part::processes]], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for part in range(processes)
    ]  # fmt: skip
    results: dict[str, Any] = {}
    for process in started:
        out, err = process.communicate(timeout=1200)
        assert process.returncode == 0, err[-3000:]
        results |= json.loads(out)
    return results
