"""Native code of a package: packs kernels into one archive and builds the plugin libraries around it."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from still_export.package.archive import MAGIC
from still_graphs.errors import StillExportError

INCLUDE_VARIABLE = "STILL_TENSORRT_INCLUDE"
USUAL_CUDA_INCLUDES = ("/usr/local/cuda/include", "/usr/include")
CUDA_HEADER, CUDA_PART = "cuda_runtime_api.h", "crt/host_defines.h"
CUDA_12 = ("cuda_runtime", "cuda_nvcc", "nvidia-cuda-nvcc-cu12")
"""Folders of NVIDIA's CUDA 12 packages with runtime and compiler, and the second's package; later versions have one folder, such as
cu13."""
USUAL_INCLUDES = ("/usr/include/x86_64-linux-gnu", "/usr/include/aarch64-linux-gnu", "/usr/local/tensorrt/include")
ROOT = Path(__file__).resolve().parents[3]
SOURCE = next(
    (p for p in (ROOT / "plugins", ROOT / "still_plugins") if (p / "core/still_core.h").is_file()), ROOT / "plugins"
)
"""The C++ sources: `plugins` in a clone, installed by a wheel as `still_plugins` next to this package."""
OP_FOLDERS = next((p for p in (ROOT / "kernels/still_kernels", ROOT / "still_kernels") if p.is_dir()), ROOT)
"""Folders of ops, with the spec.py and cpu/ that the sources include."""


CPUS = ("x86_64", "aarch64")
"""Processors that native code is compiled for."""
SYSTEM = "Linux"


class PluginBuildError(StillExportError):
    """A plugin library cannot be built: a tool, a header or the sources are missing, or the compiler failed."""


def pack_archive(folders: list[Path], target: Path) -> Path:
    """Write the packed archive that the core embeds or reads: the indexes of all folders, then the cubins.

    Args:
        folders: Each has index.json and the cubins named in it.
        target: File to write.

    Raises:
        PluginBuildError: A folder has no index, or a cubin is missing.
    """
    indexes, cubins, blobs = [], {}, bytearray()
    for folder in folders:
        path = folder / "index.json"
        if not path.is_file():
            raise PluginBuildError(f"{path}: missing. Compile the kernels into {folder} first.")
        index = json.loads(path.read_text())
        indexes.append(index)
        for variant in index["variants"]:
            for kernel in variant["kernels"].values():
                name = kernel["cubin"]
                if name in cubins:
                    continue
                if not (folder / name).is_file():
                    raise PluginBuildError(f"{folder / name}: missing, but {path} names it. Compile the kernels again.")
                content = (folder / name).read_bytes()
                cubins[name] = {"offset": len(blobs), "size": len(content)}
                blobs += content + bytes(-len(content) % 16)
    pack = {"format": "still-kernels-pack", "version": 1, "indexes": indexes, "cubins": cubins}
    text = json.dumps(pack, sort_keys=True, separators=(",", ":")).encode()
    head = MAGIC + struct.pack("<Q", len(text)) + text
    target.write_bytes(head + bytes(-len(head) % 16) + bytes(blobs))
    return target


def compile_archive(variants: Mapping[str, list[Any]], archs: Sequence[str], target: Path) -> Path:
    """Compile kernels ahead of time and pack them.

    Args:
        variants: Variants to compile, by op.
        archs: Architectures such as "sm_90".
        target: File to write; a folder next to it has the parts meanwhile.
    """
    from still_kernels.aot import parse_arch, write_archive

    parts = target.with_name(f".{target.name}.parts")
    for op, wanted in variants.items():
        write_archive(parts / op, [parse_arch(a) for a in archs], op, wanted)
    pack_archive(sorted(parts.iterdir()), target)
    shutil.rmtree(parts)
    return target


def find_tensorrt_headers(folders: tuple[str, ...] = ()) -> list[Path]:
    """Folders of NvInfer.h: `folders`, or STILL_TENSORRT_INCLUDE, or the usual places that have it.

    Raises:
        PluginBuildError: A folder in `folders` has no NvInfer.h.
    """
    named = list(folders) or [p for p in os.environ.get(INCLUDE_VARIABLE, "").split(os.pathsep) if p]
    for folder in named:
        if not (Path(folder) / "NvInfer.h").is_file():
            raise PluginBuildError(f"{folder} has no NvInfer.h. Give the include folder of a TensorRT installation.")
    return [Path(p) for p in named] or [p for p in map(Path, USUAL_INCLUDES) if (p / "NvInfer.h").is_file()]


def tensorrt_major(include: Path) -> int:
    """Major version of the TensorRT headers in `include`.

    Raises:
        PluginBuildError: They have no version.
    """
    try:
        text = (include / "NvInferVersion.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^#define\s+(?:NV_TENSORRT_MAJOR|TRT_MAJOR_ENTERPRISE)\s+(\d+)", text, re.MULTILINE)
    if found is None:
        raise PluginBuildError(
            f"{include / 'NvInferVersion.h'} does not state its version. Give the include folder of a TensorRT installation."
        )
    return int(found[1])


def build_plugins(
    build: Path,
    *,
    archive: Path | None = None,
    tensorrt_include: Path | None = None,
    cuda_include: Path | None = None,
    runner: bool = False,
    cpu: str | None = None,
) -> Path:
    """Compile the core and, with TensorRT's headers, its adapter, with CMake.

    Args:
        build: Build folder; kept, so that a second call compiles only changes.
        archive: Packed archive to embed, or None for libraries without kernels.
        tensorrt_include: Folder of NvInfer.h, or None for the core only.
        cuda_include: Folder of cuda_runtime_api.h, which NvInfer.h includes; None: search for it.
        runner: Also build still_run.
        cpu: Target processors ("x86_64", "aarch64"); None: this machine's. Others need a cross compiler (aarch64-linux-gnu-g++).

    Raises:
        PluginBuildError: CMake, headers or the sources are missing, or the build fails; has the tool's output.
    """
    cuda = cuda_headers(cuda_include) if tensorrt_include else []
    options: dict[str, Path | str | None] = {
        **cross_compiler(cpu or this_cpu()),
        "STILL_ARCHIVE": archive,
        "TENSORRT_INCLUDE_DIR": tensorrt_include,
        "CUDA_INCLUDE_DIR": ";".join(str(folder.resolve()) for folder in cuda),
    }
    return run_cmake(SOURCE, build, {**options, "STILL_RUNNER": "ON" if runner else "OFF"})


def cuda_headers(include: Path | None = None) -> list[Path]:
    """Include folders of CUDA's runtime: `include`, or [] if CMake's usual places have it, or those of NVIDIA's packages (dependencies of
    PyTorch for GPUs).

    Raises:
        PluginBuildError: They are missing or incomplete; the message names the missing package.
    """
    if include is not None:
        if not (include / CUDA_HEADER).is_file():
            raise PluginBuildError(f"{include} has no {CUDA_HEADER}. Give the include folder of a CUDA installation.")
        return [include]
    if any((Path(folder) / CUDA_HEADER).is_file() for folder in USUAL_CUDA_INCLUDES):
        return []
    found = importlib.util.find_spec("nvidia")
    includes = [
        i for root in (found and found.submodule_search_locations) or () for i in sorted(Path(root).glob("*/include"))
    ]
    runtimes = [i for i in includes if (i / CUDA_HEADER).is_file()]
    for runtime in runtimes:  # by name: cu13 before CUDA 12's cuda_runtime
        if (runtime / CUDA_PART).is_file():
            return [runtime]
        twelve = runtime.parent.name == CUDA_12[0]
        if (
            twelve
            and (part := runtime.parents[1] / CUDA_12[1] / "include") in includes
            and (part / CUDA_PART).is_file()
        ):
            return [runtime, part]
    folder = ", or give the include folder of a CUDA installation with --cuda-include"
    if runtimes:
        package = CUDA_12[2] if runtimes[0].parent.name == CUDA_12[0] else "nvidia-cuda-crt"
        raise PluginBuildError(
            f"{runtimes[0]} has no {CUDA_PART}, which {CUDA_HEADER} includes. Run: pip install {package}{folder}."
        )
    raise PluginBuildError(
        f"{CUDA_HEADER}, which TensorRT's NvInfer.h includes, is not here. Run: pip install nvidia-cuda-runtime nvidia-cuda-crt{folder}."
    )


def oldest_glibc(library: Path) -> int:
    """The minor version of the oldest glibc 2 that has all symbols which a program or library asks for; 0: it asks for none."""
    return max(map(int, re.findall(rb"\0GLIBC_2\.(\d+)", library.read_bytes())), default=0)


def json_headers() -> Path | None:
    """Include folder of the package nlohmann-json, part of still-export[onnx]; None: CMake searches the usual places."""
    found = importlib.util.find_spec("nlohmann_json")
    return Path(found.origin).parent / "include" if found and found.origin else None


def run_cmake(source: Path, build: Path, options: dict[str, Path | str | None], target: str = "all") -> Path:
    """Configure the CMake project in `source` and build `target`. Paths in the options become absolute, None becomes empty.

    Raises:
        PluginBuildError: CMake or the sources are missing, or the build fails; has the tool's output.
    """
    if not (source / "CMakeLists.txt").is_file():
        raise PluginBuildError(f"{source}: the C++ sources are missing. Install still-export again.")
    cmake = shutil.which("cmake")
    if cmake is None:
        raise PluginBuildError(
            "cmake is missing. Install cmake and a C++17 compiler, or use a prebuilt plugin library."
        )
    cache = build / "CMakeCache.txt"
    if cache.is_file() and f"CMAKE_HOME_DIRECTORY:INTERNAL={source}\n" not in cache.read_text(encoding="utf-8"):
        shutil.rmtree(build)  # built from another checkout, which CMake refuses
    configure = [cmake, "-S", str(source), "-B", str(build)]
    if shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    here = {
        "JSON_INCLUDE_DIR": json_headers(),
        "Python3_EXECUTABLE": sys.executable,
    }
    for option, value in {**here, **options}.items():
        configure.append(f"-D{option}={value.resolve() if isinstance(value, Path) else value or ''}")
    for command in (configure, [cmake, "--build", str(build), "--parallel", "--target", target]):
        done = subprocess.run(command, text=True, capture_output=True)
        if done.returncode:
            raise PluginBuildError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return build


def this_cpu() -> str:
    """This machine's processor kind, such as "x86_64"."""
    return platform.machine()


def cross_compiler(cpu: str) -> dict[str, str]:
    """CMake's options to compile for `cpu`; {} for this machine."""
    if cpu == this_cpu():
        return {}
    compiler = f"{cpu}-linux-gnu-g++"
    if shutil.which(compiler) is None:
        raise PluginBuildError(
            f"code for {cpu} needs {compiler}, which is not installed. Install g++-{cpu.replace('_', '-')}-linux-gnu, or export "
            "on such a machine."
        )
    return {"CMAKE_SYSTEM_NAME": SYSTEM, "CMAKE_SYSTEM_PROCESSOR": cpu, "CMAKE_CXX_COMPILER": compiler}
