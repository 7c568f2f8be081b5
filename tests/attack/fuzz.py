"""The fuzz targets of tests/plugins/fuzz for so many processor seconds each, under the address and undefined behaviour sanitizers."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def attack(seconds: float, seed: int) -> bool:
    """Build and run every target; print what each ran."""
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "graphs")]
    from tests.plugins import builds
    from tests.plugins.core_abi import compile_recorder
    from tests.plugins.test_fuzz import RUNS, corpus

    build = builds.sanitized("fuzz") / "fuzz"
    good = True
    for target in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            at = Path(folder) / "at"
            driver = str(compile_recorder(Path(folder)))
            command = [build / f"fuzz_{target}", "--seed", str(seed), "--seconds", str(seconds)]
            done = subprocess.run(
                [*command, *corpus(target, Path(folder) / "corpus")],
                capture_output=True,
                text=True,
                env={**os.environ, "STILL_FUZZ_AT": str(at), "STILL_FUZZ_DRIVER": driver},
            )
            said = (
                done.stdout.strip()
                or f"FAILED at input {at.read_text().strip()} of seed {seed}:\n{done.stderr[-3000:]}"
            )
            print(f"{target}: {said}", flush=True)
            good &= done.returncode == 0
    return good
