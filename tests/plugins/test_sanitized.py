"""The tests of the CPU kernels once more, with the library built for the address and undefined behaviour sanitizers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from still_export.targets.ort.library import LIBRARY
from tests.plugins import builds


def preloaded() -> str:
    """The sanitizers' libraries, which a program that is not built with them must load first."""
    names = ("libasan.so", "libubsan.so")
    paths = [
        subprocess.run(["g++", f"-print-file-name={n}"], capture_output=True, text=True).stdout.strip() for n in names
    ]
    if not all(Path(path).is_absolute() for path in paths):
        pytest.skip("this g++ has no sanitizers")
    return " ".join(paths)


@pytest.mark.slow
@pytest.mark.long
def test_kernels_under_the_sanitizers() -> None:
    """All ops, each instruction set, both element types, full caches and refused calls: no finding, and the same answers."""
    builds.demand_headers()
    built = builds.sanitized("still_onnxruntime") / "onnxruntime" / LIBRARY
    environment = {
        **os.environ,
        "STILL_TEST_LIBRARY": str(built),
        "LD_PRELOAD": preloaded(),
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",  # Python frees little at its end
        "PYTHONMALLOC": "malloc",
    }
    tests = [f"tests/plugins/test_{name}.py" for name in ("onnxruntime", "attention", "linear_attention")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-x", "-p", "no:cacheprovider", *tests],
        cwd=builds.ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout
