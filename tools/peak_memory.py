#!/usr/bin/env python3
"""Run a command and say how much memory it took: of its own (anonymous), and with the files that it mapped.

python tools/peak_memory.py still-export MODEL --to onnx -o DIR
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

INTERVAL_S = 0.01


def resident_kb(pid: int) -> dict[str, int]:
    """Resident memory of a process by kind; empty when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {
        name: int(rest.split()[0])
        for name, _, rest in (x.partition(":") for x in lines)
        if name in ("RssAnon", "VmRSS")
    }


def main(command: list[str]) -> int:
    """Returns the exit code of the command."""
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    peak = {"RssAnon": 0, "VmRSS": 0}
    begin = time.monotonic()
    with subprocess.Popen(command) as child:
        while child.poll() is None:
            for name, value in resident_kb(child.pid).items():
                peak[name] = max(peak[name], value)
            time.sleep(INTERVAL_S)
    took = time.monotonic() - begin
    print(
        f"peak: {peak['RssAnon'] / 1024:,.0f} MiB anonymous, {peak['VmRSS'] / 1024:,.0f} MiB with files; {took:,.1f} s"
    )
    return child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
