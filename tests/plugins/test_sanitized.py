"""The tests of the CPU kernels once more, with the library built for the address and undefined behaviour sanitizers."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from still_export.export.native import LIBRARY, find_onnxruntime_headers
from still_export.export.plugins import SOURCE, PluginBuildError, run_cmake

ROOT = Path(__file__).resolve().parents[2]


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
def test_kernels_under_the_sanitizers() -> None:
    """Each instruction set, both element types, splits of a sequence, full caches and refused calls: no finding, and the same answers."""
    if not shutil.which("cmake") or not shutil.which("g++"):
        pytest.skip("needs cmake and g++")
    try:
        include = find_onnxruntime_headers()
    except PluginBuildError as error:
        pytest.skip(str(error))
    flags = "-g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
    options: dict[str, Path | str | None] = {
        "ONNXRUNTIME_INCLUDE_DIR": include,
        "CMAKE_CXX_FLAGS": flags,
        "STILL_CPU_OPTIMIZATION": "-O1",
    }
    folder = ROOT / "build/plugins-sanitized"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = run_cmake(SOURCE, folder, options, "still_onnxruntime") / "onnxruntime" / LIBRARY
    environment = {
        **os.environ,
        "STILL_TEST_LIBRARY": str(built),
        "LD_PRELOAD": preloaded(),
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",  # Python frees little at its end
        "PYTHONMALLOC": "malloc",
    }
    chosen = "refused or optional or (equals_stateful and fold)"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "tests/plugins/test_onnxruntime.py",
            "-k",
            chosen,
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout or "100%" in done.stdout
