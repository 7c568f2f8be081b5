"""What the tests compile of plugins/: two folders of build/, which git ignores, one optimized and one under the sanitizers.

Every test of one kind configures the same targets, so that each source is compiled once per checkout whoever comes first. As a program:
compile what every run of the tests needs, with no package but pytest and nlohmann-json, while the others are installed.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from still_export.package.cache import CACHE_VARIABLE
from still_export.targets.ort.headers import fetch_headers, find_onnxruntime_headers
from still_export.targets.trt.plugins import INCLUDE_VARIABLE, SOURCE, PluginBuildError, run_cmake

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "tests/toy"
"""An op beside those of the tree, compiled in with them."""
FOLDERS = [p for p in os.environ.get(INCLUDE_VARIABLE, "").split(os.pathsep) if p]
"""Folders of NvInfer.h that were named."""


def demand_tools() -> None:
    if not shutil.which("cmake") or not shutil.which("g++"):
        pytest.skip("needs cmake and g++")


def demand_headers() -> Path:
    """Folder of ONNX Runtime's C header; skips the test where there is none."""
    try:
        return find_onnxruntime_headers()
    except PluginBuildError as error:
        pytest.skip(str(error))


def headers() -> Path | None:
    """The same, None where there is none."""
    try:
        return find_onnxruntime_headers()
    except PluginBuildError:
        return None


@contextmanager
def locked(name: str) -> Iterator[Path]:
    """A folder of build/ for this process alone: test processes run side by side."""
    folder = ROOT / "build" / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def optimized(target: str, pattern: str, into: Path, archive: Path | None = None) -> Path:
    """Build `target` with the toy op and the archive's kernels, and copy the one library that `pattern` names into a folder.

    Copied, as the next who builds with another archive links it anew.
    """
    demand_tools()
    options: dict[str, Path | str | None] = {
        "ONNXRUNTIME_INCLUDE_DIR": headers(),
        "TENSORRT_INCLUDE_DIR": FOLDERS[0] if FOLDERS else None,
        "STILL_OPS": str(TOY),
        "STILL_ARCHIVE": archive,
    }
    with locked("plugins") as folder:
        built = next(run_cmake(SOURCE, folder, options, target).glob(pattern))
        return Path(shutil.copy(built, into / built.name))


def sanitized(target: str) -> Path:
    """Build `target` under the address and undefined behaviour sanitizers; the build folder."""
    demand_tools()
    options: dict[str, Path | str | None] = {
        "STILL_FUZZ": Path(__file__).parent / "fuzz",
        "ONNXRUNTIME_INCLUDE_DIR": headers(),
        "STILL_CPU_OPTIMIZATION": "-O1",
    }
    with locked("plugins-sanitized") as folder:
        return run_cmake(SOURCE, folder, options, target)


def main() -> None:
    """The largest first; ONNX Runtime's headers are fetched to where tools/test.sh looks for them."""
    os.environ[CACHE_VARIABLE] = str(ROOT / "build")
    try:
        find_onnxruntime_headers()
    except PluginBuildError:
        fetch_headers()
    with tempfile.TemporaryDirectory() as folder:
        optimized("still_onnxruntime", "onnxruntime/*.so", Path(folder))
        optimized("still_core", "libstill_core.so", Path(folder))
    sanitized("read_manifest")


if __name__ == "__main__":
    main()
