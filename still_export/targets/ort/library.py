"""The library of kernels for ONNX Runtime: one per processor kind for all models; of still-export-kernels, or built once and cached.

It selects instruction sets at run time. The setup.py of still-export-kernels imports this module with only setuptools, filelock and
nlohmann-json installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from still_export.package.cache import cache_folder
from still_export.package.files import sha256
from still_export.package.installed import KERNELS, installed_kernels
from still_export.targets.ort.headers import fetch_headers, find_onnxruntime_headers, make_cache
from still_export.targets.trt.plugins import (
    CPUS,
    OP_FOLDERS,
    SOURCE,
    SYSTEM,
    PluginBuildError,
    cross_compiler,
    run_cmake,
    this_cpu,
)
from still_export.version import __version__

__all__ = [
    "CPUS",
    "SYSTEM",
    "build_library",
    "build_with_archive",
    "cached_library",
    "can_build",
    "cross_compiler",
    "demand_build",
    "describe_build",
    "find_library",
    "keep_library",
    "this_cpu",
]

LIBRARY = "libstill_onnxruntime.so"
BUILD_VARIABLE = "STILL_BUILD_KERNELS"
"""Environment variable; 0: exports do not build kernels on their own."""
DIGEST = f"{LIBRARY}.sha256"
SOURCES = ("CMakeLists.txt", "write_op_specs.py", "exports.map", "core", "cpu", "onnxruntime")
FLAGS = ("CXXFLAGS", "LDFLAGS")
"""Environment variables with flags for CMake."""


def find_library(cpu: str | None = None) -> Path | None:
    """The library for processors `cpu` ("x86_64", "aarch64"; None: this machine's) of still-export-kernels, or else of the cache.

    Returns:
        None: there is neither, or, which a line on stderr says, still-export-kernels is of other sources than this still-export.
    """
    if cpu is None and platform.system() != SYSTEM:
        return None
    cpu = cpu or this_cpu()
    cached = cached_library(cpu)
    return _installed(cpu) or (cached if _is_whole(cached) else None)


def build_library(cpu: str | None = None, include: Path | None = None) -> Path:
    """The library of still-export-kernels or of the cache, built first if missing: one to three minutes of a processor.

    Args:
        cpu: Target processors; None: this machine's. Others need a cross compiler (aarch64-linux-gnu-g++).
        include: Folder of ONNX Runtime's C header; None: search the usual places, or fetch it.

    Raises:
        PluginBuildError: CMake, a compiler, the header or the sources are missing, or the build fails; has the tool's output.
    """
    if found := find_library(cpu):
        return found
    cpu = cpu or this_cpu()
    return _build(cpu, include, None, cached_library(cpu))


def build_with_archive(archive: Path, target: Path, include: Path | None = None) -> Path:
    """Build the library for this machine with embedded GPU kernels, as the file `target`.

    Objects of earlier builds are linked again, which takes seconds.

    Raises:
        PluginBuildError: See `build_library`.
    """
    return _build(this_cpu(), include, archive, target)


def can_build() -> bool:
    """Whether an export may build kernels on its own: CMake and a compiler exist, and the environment allows it."""
    compilers = (os.environ.get("CXX", "").split(" ")[0] or "c++", "g++", "clang++")
    able = platform.system() == SYSTEM and shutil.which("cmake") is not None and any(map(shutil.which, compilers))
    return able and os.environ.get(BUILD_VARIABLE, "1") != "0"


def demand_build(include: Path | None = None) -> None:
    """Raise PluginBuildError if no library can be built, before minutes of work."""
    if platform.system() != SYSTEM:
        raise PluginBuildError(f"kernels are built on {SYSTEM}, not on {platform.system()}. Export with --no-native.")
    if include:
        find_onnxruntime_headers(include)


def cached_library(cpu: str) -> Path:
    """Path in the cache for the library of these sources, processor and flags."""
    flags = repr([os.environ.get(name) for name in FLAGS])
    digest = hashlib.sha256((sources_digest() + flags).encode()).hexdigest()
    return cache_folder() / "kernels" / f"{cpu}-{digest[:16]}" / LIBRARY


def sources_digest() -> str:
    """SHA-256 of all sources that the library is compiled from."""
    digest = hashlib.sha256()
    files = [f for name in SOURCES for f in [SOURCE / name, *(SOURCE / name).rglob("*")] if f.is_file()]
    files += [*OP_FOLDERS.glob("*/spec.py"), *OP_FOLDERS.glob("*/cpu/*")]
    for path in sorted(files):
        content = path.read_bytes()
        place = path.relative_to(SOURCE if SOURCE in path.parents else OP_FOLDERS)
        digest.update(f"{place} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def describe_build(library: Path, cpu: str) -> dict[str, Any]:
    """What still-export-kernels says of its `library` for processors `cpu`, as build.json."""
    from still_graphs.ops import OPS

    return {
        "version": __version__,
        "library": LIBRARY,
        "sha256": sha256(library),
        "machine": cpu,
        "sources": sources_digest(),
        "ops": {name: spec.version for name, spec in OPS.items()},
    }


def _installed(cpu: str) -> Path | None:
    """The library of still-export-kernels for `cpu`, if it was built from these sources."""
    found = installed_kernels(cpu)
    if found is None or found.sources == sources_digest():
        return found.path if found else None
    print(
        f"{KERNELS} {found.version} is of other sources than this still-export {__version__}, so its library is not used. "
        f"Run: pip install {KERNELS}=={__version__}.",
        file=sys.stderr,
    )
    return None


def _build(cpu: str, include: Path | None, archive: Path | None, target: Path) -> Path:
    """Build the library in the cache, one process at a time, and move it to `target` once complete."""
    from filelock import FileLock

    demand_build(include)
    compiler = cross_compiler(cpu)
    home = make_cache(cached_library(cpu).parent)
    with FileLock(home / "lock"):
        if archive is None and _is_whole(target):  # another process has built it in the meantime
            return target
        options: dict[str, Path | str | None] = {
            "ONNXRUNTIME_INCLUDE_DIR": _headers(include).resolve(),
            "STILL_ARCHIVE": archive,
            **compiler,
        }
        built = run_cmake(SOURCE, home / "build", options, "still_onnxruntime") / "onnxruntime" / LIBRARY
        if archive is None:
            keep_library(built, target)
        else:
            _put(built.read_bytes(), target)
    return target


def keep_library(built: Path, target: Path) -> None:
    """Copy a library into the cache, with its SHA-256."""
    content = built.read_bytes()
    target.parent.mkdir(parents=True, exist_ok=True)
    _put(hashlib.sha256(content).hexdigest().encode(), target.with_name(DIGEST))
    _put(content, target)


def _put(content: bytes, target: Path) -> None:
    """Write a file atomically."""
    whole = target.with_name(f".{target.name}.{os.getpid()}")
    with whole.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(whole, target)


def _is_whole(library: Path) -> bool:
    """Whether the cached library is unchanged; a damaged one is reported and not used."""
    if not library.is_file():
        return False
    try:
        if sha256(library) == library.with_name(DIGEST).read_text(encoding="ascii"):
            return True
    except (OSError, ValueError):
        pass
    print(
        f"{library} is not the file that was built, so it is not used: it is built again when needed",
        file=sys.stderr,
    )
    return False


def _headers(include: Path | None) -> Path:
    try:
        return find_onnxruntime_headers(include)
    except PluginBuildError:
        if include:
            raise
        return fetch_headers()
