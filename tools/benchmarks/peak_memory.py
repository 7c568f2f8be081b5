"""Run a command and say how much memory it took: of its own (anonymous), and with the files that it mapped, and its time.

python -m tools.benchmarks.peak_memory [--record FOLDER] -- still-export MODEL --to onnx -o DIR
"""

from __future__ import annotations

import argparse
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

from tools.benchmarks.common import Findings, parser_of

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


def main() -> int:
    """Returns the exit code of the command."""
    parser = parser_of(__doc__)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command is given")
    peak = {"RssAnon": 0, "VmRSS": 0}
    begin = time.monotonic()
    with subprocess.Popen(command) as child:
        while child.poll() is None:
            for name, value in resident_kb(child.pid).items():
                peak[name] = max(peak[name], value)
            time.sleep(INTERVAL_S)
    found = Findings()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    own, files = (round(peak[name] / 1024) for name in ("RssAnon", "VmRSS"))
    found.add(
        anonymous_mib=own,
        with_files_mib=files,
        seconds=round(time.monotonic() - begin, 1),
        processor_seconds=round(used.ru_utime + used.ru_stime, 1),
        exit_code=child.returncode,
    )
    found.record(options.record, "peak memory", {"command": shlex.join(command)})
    return child.returncode


if __name__ == "__main__":
    sys.exit(main())
