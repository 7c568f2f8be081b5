"""ONNX Runtime's C headers, which its wheels lack: their location, and how to fetch them."""

from __future__ import annotations

import errno
import hashlib
import io
import os
from importlib.util import find_spec
from pathlib import Path

from still_export.extras import demand
from still_export.package.cache import CACHE_VARIABLE, cache_folder
from still_export.targets.trt.plugins import PluginBuildError

HEADER = "onnxruntime_c_api.h"
INCLUDE_VARIABLE = "STILL_ONNXRUNTIME_INCLUDE"
USUAL_INCLUDES = tuple(
    f"{root}/include{tail}"
    for root in ("/usr", "/usr/local", "/opt/onnxruntime")
    for tail in ("/onnxruntime", "", "/onnxruntime/core/session")
)
NAME = "libonnxruntime-dev_1.21.0+dfsg-1_amd64.deb"
"""Debian's package, 85 KB, MIT licence; the headers are equal on all architectures."""
URL = f"http://deb.debian.org/debian/pool/main/o/onnxruntime/{NAME}"
SHA256 = "14f7d959d5deacbcf1504830d4189f91fc67382b399ed9ae9d3aa9c4050ced08"
TIMEOUT_S = 60
HEADERS, LIBRARIES = "onnxruntime-include", "onnxruntime-lib"
"""Folders of the cache."""


def make_cache(folder: Path) -> Path:
    """Create a `folder` in the cache.

    Raises:
        PluginBuildError: It is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise PluginBuildError(
            f"{folder}, the cache for builds, cannot be written ({error.strerror}). Name another folder by {CACHE_VARIABLE}."
        ) from error
    return folder


def fetched_headers() -> Path:
    return cache_folder() / HEADERS


def find_onnxruntime_headers(include: Path | None = None) -> Path:
    """Folder of ONNX Runtime's C header: `include`, or STILL_ONNXRUNTIME_INCLUDE, or the first usual place that has it.

    Raises:
        PluginBuildError: The header was not found.
    """
    named = include or os.environ.get(INCLUDE_VARIABLE)
    if named and not (Path(named) / HEADER).is_file():
        raise PluginBuildError(f"{named} has no {HEADER}. Give the folder of ONNX Runtime's C headers.")
    places = [Path(named)] if named else [*map(Path, USUAL_INCLUDES), fetched_headers()]
    for folder in places:
        if (folder / HEADER).is_file():
            return folder
    raise PluginBuildError(
        f"the kernels need {HEADER}, which no wheel of ONNX Runtime has. Install libonnxruntime-dev, fetch the headers with "
        "still-export kernels headers, or give their folder with --onnxruntime-include."
    )


def fetch_headers() -> Path:
    """The headers' folder in the cache, fetched from Debian's package libonnxruntime-dev if missing.

    Raises:
        PluginBuildError: They cannot be fetched, or are not the expected ones.
    """
    import tarfile
    import urllib.request

    folder = fetched_headers()
    if (folder / HEADER).is_file():
        return folder
    try:
        with urllib.request.urlopen(URL, timeout=TIMEOUT_S) as answer:
            package = answer.read()
    except OSError as error:
        raise PluginBuildError(
            f"{URL} cannot be fetched: {error}. Give the folder of {HEADER} of ONNX Runtime 1.18 or later with --onnxruntime-include."
        ) from error
    if hashlib.sha256(package).hexdigest() != SHA256:
        raise PluginBuildError(
            f"{URL} is not the expected file: its SHA-256 differs from {SHA256}. "
            "Name ONNX Runtime's headers with --onnxruntime-include."
        )
    make_cache(folder)
    with tarfile.open(fileobj=io.BytesIO(_members(package)["data.tar.xz"])) as tar:
        headers = [entry for entry in tar if entry.isfile() and entry.name.endswith(".h")]
        headers.sort(key=lambda entry: entry.name.endswith(HEADER))  # HEADER last: it marks the folder as complete
        for entry in headers:
            content = tar.extractfile(entry)
            if content is not None:
                (folder / Path(entry.name).name).write_bytes(content.read())
    return folder


def compiler_flags(genai: bool = False) -> list[str]:
    """Compiler flags for a C++ program: the headers, and the library of onnxruntime's wheel under its loaded name.

    Args:
        genai: Link onnxruntime-genai's library, too.

    Raises:
        ModuleNotFoundError: A wheel is not installed.
        PluginBuildError: The headers are missing, or the wheel has no library of this kind (Linux only).
    """
    demand("onnxruntime", *(["onnxruntime_genai"] if genai else []))
    try:
        include = find_onnxruntime_headers()
    except PluginBuildError:
        include = fetch_headers()
    found = sorted(_wheel("onnxruntime").glob("capi/libonnxruntime.so.*"))
    if not found:
        raise PluginBuildError(
            f"{_wheel('onnxruntime')} has no capi/libonnxruntime.so: link ONNX Runtime's own release."
        )
    folder = make_cache(cache_folder() / LIBRARIES / hashlib.sha256(str(found[-1]).encode()).hexdigest()[:16])
    library = folder / "libonnxruntime.so.1"
    if not library.exists():
        library.unlink(missing_ok=True)
        library.symlink_to(found[-1])
    linked = [library, *([_wheel("onnxruntime_genai") / "libonnxruntime-genai.so"] if genai else [])]
    folders = [f"-Wl,-rpath,{path.parent}" for path in linked]
    return ["-isystem", str(include), "-Wl,--no-as-needed", *map(str, linked), *folders]


def release_flags(folder: str) -> list[str]:
    """The same over ONNX Runtime's release in `folder` (include/, lib/), with no path of this machine."""
    return ["-isystem", f"{folder}/include", f"-L{folder}/lib", f"-Wl,-rpath,{folder}/lib", "-lonnxruntime"]


def _wheel(module: str) -> Path:
    found = find_spec(module)
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def _members(archive: bytes) -> dict[str, bytes]:
    """Files in an ar archive (.deb), by name."""
    found, at = {}, 8
    while at + 60 <= len(archive):
        name, size = archive[at : at + 16].decode().strip().rstrip("/"), int(archive[at + 48 : at + 58])
        found[name] = archive[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    return found
