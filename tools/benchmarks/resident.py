"""Whose a process's memory is when a package has read a prompt and said some tokens, MB by owner; `bench` measures the same process.

  python -m tools.benchmarks.resident PACKAGE --length 1024 --threads 2 --record FOLDER

Mapped files are the package's by name, and libraries; pages that are mapped twice count twice, as in every figure of resident memory. What
the process allocated is told apart by when it became resident: with the interpreter and its modules, the tokenizer, the session (its graph
and copies of weights, where it makes any), or in a call (states, arena, scratch memory). Linux alone.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from still_export.evaluation.bench import BenchOptions
from still_export.loading.runtimes import open_runner, runtime_of
from still_export.package.checked import read_manifest
from still_export.runtime.sampling import likeliest
from still_export.runtime.text import Text
from tools.benchmarks.common import Findings, parser_of

MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)\n?")
ALLOCATED, LIBRARIES = "allocated", "libraries"
MB = 1024


def owners(lines: Iterable[str], package: Path) -> Counter[str]:
    """Resident kB of the lines of /proc/self/smaps: of each file of the package, of libraries, and what was allocated."""
    found: Counter[str] = Counter()
    owner = ALLOCATED
    for line in lines:
        if mapping := MAPPING.fullmatch(line):
            path = Path(mapping[1])
            owner = path.name if path.parent == package else LIBRARIES if path.is_absolute() else ALLOCATED
        elif line.startswith("Rss:"):
            found[owner] += int(line.split()[1])
    return found


def main() -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    package, setting = given.package.resolve(), BenchOptions(threads=given.threads, lengths=(given.length,))
    found, allocated = Findings(), 0

    def stage(owner: str) -> Counter[str]:
        """Add what has been allocated since the last stage."""
        nonlocal allocated
        with Path("/proc/self/smaps").open(encoding="utf-8", errors="replace") as lines:
            held = owners(lines, package)
        found.add(owner=owner, mb=round((held[ALLOCATED] - allocated) / MB, 1))
        allocated = held.pop(ALLOCATED)
        return held

    manifest = read_manifest(package)
    setting.fitting_lengths(manifest)
    runtime = runtime_of(manifest["target"], setting.runtime).name
    import onnxruntime  # noqa: F401  # with the modules, not with the session

    stage("Python and modules")
    model = open_runner(package, manifest, runtime, threads=given.threads)
    stage("session")
    Text(model)
    stage("tokenizer")
    tokens = np.random.default_rng(0).integers(0, manifest["model"]["vocab_size"], (1, given.length))
    model.start(1, setting.room(given.length))
    for start in range(0, given.length, model.prefill_tokens):
        logits = model.feed(tokens[:, start : start + model.prefill_tokens])
    steps = model.greedy(likeliest(logits[:, -1]), setting.steps)
    for _ in range(setting.steps):
        next(steps)
    files = stage("states, arena and scratch memory")
    for name, kb in files.most_common():
        found.add(owner=name, mb=round(kb / MB, 1))
    found.add(owner="peak", mb=round(model.peak_mb(), 1))
    found.record(given.record, f"resident {package.name}", {"package": package.name, "length": str(given.length)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
