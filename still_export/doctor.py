"""What this machine can export, build, run and train, what to install for the rest, and where a package runs here."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from still_export.package.installed import KERNELS, kernels_for
from still_export.package.trust import trusts
from still_export.runtime.cuda_driver import CudaError, Driver
from still_export.targets.ort.library import find_library
from still_export.targets.registry import packaged_target
from still_export.targets.trt.plugins import SOURCE, PluginBuildError, find_tensorrt_headers
from still_graphs.errors import ConfigError
from still_graphs.states import StateTable
from still_kernels.common.cuda_function import nvrtc

if TYPE_CHECKING:
    from still_export.package.folder import Package

DISTRIBUTION = "still-export"
BUILD_KERNELS = f"pip install {KERNELS}, or still-export kernels build"


@dataclass(frozen=True)
class Finding:
    """One use of this project.

    able: Whether it works here. detail: With which versions and devices. todo: Instructions if it does not work.
    """

    what: str
    able: bool
    detail: str
    todo: str = ""


def examine() -> list[Finding]:
    """All findings, in the order in which a user needs them. Imports no framework, so it is done in a second."""
    gpu = find_gpu()
    return [
        _extra("export and run with ONNX Runtime on the CPU", "onnx"),
        _native(),
        _providers(gpu),
        _extra("read GGUF models", "gguf"),
        _tensorrt_export(),
        _engines(gpu),
        _extra("serve", "serve"),
        _extra("draw reports (--report)", "report"),
        _extra("linearize", "train", note=gpu or "on the CPU alone: small models, or hours"),
    ]


def find_gpu() -> str | None:
    """The first NVIDIA GPU as the driver names it, None where there is none."""
    try:
        return str(Driver().name)
    except (CudaError, OSError):
        return None


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def packages_of(extra: str) -> list[str]:
    """Distributions that an extra needs on this machine."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for line in requirements:
        requirement, _, marker = line.partition(";")
        if re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", marker):
            found.append(re.split(r"[<>=!~\[ ]", requirement.strip())[0])
    return found


def _extra(what: str, extra: str, note: str = "") -> Finding:
    versions = {package: version(package) for package in packages_of(extra)}
    missing = [package for package, found in versions.items() if found is None]
    if not versions:
        return Finding(what, False, "still-export itself is not installed", "pip install -e .")
    if missing:
        return Finding(what, False, f"without {', '.join(missing)}", f"pip install '{DISTRIBUTION}[{extra}]'")
    listed = ", ".join(f"{package} {found}" for package, found in versions.items())
    return Finding(what, True, f"{listed}; {note}" if note else listed)


def _tools() -> tuple[list[str], list[str]]:
    """CMake and a C++ compiler: those found, those missing."""
    compiler = os.environ.get("CXX") or next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), "c++")
    tools = {"cmake": shutil.which("cmake"), "a C++ compiler": shutil.which(compiler)}
    return [str(path) for path in tools.values() if path], [tool for tool, path in tools.items() if not path]


def _native() -> Finding:
    what = "export with kernels for CPUs (--native)"
    if library := find_library():
        return Finding(what, True, str(library))
    if platform.system() != "Linux":
        return Finding(what, False, f"on {platform.system()}", "export on Linux; packages without them run here")
    _, missing = _tools()
    if not SOURCE.is_dir():
        return Finding(what, False, "without the C++ sources", "install a wheel of still-export, or work in a clone")
    if missing:
        return Finding(
            what, False, f"without {', '.join(missing)}", f"pip install {KERNELS}, or apt-get install cmake g++"
        )
    return Finding(what, False, "not built yet", BUILD_KERNELS)


def _providers(gpu: str | None) -> Finding:
    what = "run with ONNX Runtime on the GPU (--provider cuda)"
    if gpu is None:
        return Finding(what, False, "no NVIDIA GPU here", "")
    found = version("onnxruntime-gpu")
    if found is None:
        return Finding(
            what, False, f"{gpu}, without onnxruntime-gpu", "pip uninstall onnxruntime; pip install onnxruntime-gpu"
        )
    return Finding(what, True, f"{gpu}, onnxruntime-gpu {found}")


def _tensorrt_export() -> Finding:
    what = "export for TensorRT, with its plugin (--to trt)"
    found, missing = _tools()
    if missing:
        return Finding(what, False, f"without {', '.join(missing)}", "apt-get install cmake g++")
    triton = version("triton")
    if triton is None:
        return Finding(what, False, "without triton, which compiles the kernels", f"pip install '{DISTRIBUTION}[gpu]'")
    found += [f"triton {triton}", _cuda_compiler()]
    try:
        headers = find_tensorrt_headers()
    except PluginBuildError as error:
        return Finding(what, False, str(error), "")
    if not headers:
        todo = "install TensorRT's headers, or name their folder with --tensorrt-include"
        return Finding(what, False, "without TensorRT's headers", todo)
    return Finding(what, True, ", ".join([*found, *map(str, headers)]))


def _cuda_compiler() -> str:
    """NVRTC, or the slower way without it."""
    try:
        _, found = nvrtc()
    except ConfigError:
        return "no NVRTC (slower steps on sm_90; pip install nvidia-cuda-nvrtc-cu12)"
    return f"NVRTC {found[0]}.{found[1]}"


def _engines(gpu: str | None) -> Finding:
    what = "build and run TensorRT engines"
    engine = version("tensorrt")
    if gpu is None:
        rtx = version("tensorrt-rtx-cu13-bindings")
        note = f"; TensorRT-RTX {rtx} builds its engines without one" if rtx else ""
        return Finding(
            what, False, f"no NVIDIA GPU here{note}", "build on the machine that will run them: still-export build"
        )
    if engine is None:
        return Finding(what, False, f"{gpu}, without tensorrt", f"pip install '{DISTRIBUTION}[trt]'")
    return Finding(what, True, f"{gpu}, tensorrt {engine}")


def runs_here(package: Package) -> list[Finding]:
    """Where `package` runs on this machine, and what to do where it does not."""
    manifest, gpu = package.manifest, find_gpu()
    target = packaged_target(manifest)
    if target.runtime is not None and not target.built:
        return [_runs_on_cpu(package), _runs_on_cuda(manifest, gpu)]
    if target.runtime is not None:
        return [_runs_engine(package, gpu)]
    return [Finding("programs of your own, with TensorRT-RTX", gpu is not None, gpu or "no NVIDIA GPU here")]


def _runs_on_cpu(package: Package) -> Finding:
    manifest, what = package.manifest, "ONNX Runtime, CPU"
    found = version("onnxruntime") or version("onnxruntime-gpu")
    if found is None:
        return Finding(what, False, "without onnxruntime", f"pip install '{DISTRIBUTION}[onnx]'")
    table = StateTable.of(manifest)
    weights = sum(entry["size_bytes"] for entry in manifest["files"].values())
    needed = weights + 2 * table.size_bytes(1, table.rows(manifest["capacity"]["capacity_tokens"]))
    if (size := _memory_bytes()) and needed > size:
        detail = f"needs {needed / 1e9:.1f} GB for weights and the state at its capacity; here are {size / 1e9:.1f}"
        return Finding(what, False, detail, "quantize it (--quantize int4), or use a machine with more memory")
    native = manifest.get("native")
    if native is None:
        return Finding(what, True, f"onnxruntime {found}, function bodies", "for speed, export with --native")
    foreign = (native["system"], native["machine"]) != (platform.system(), platform.machine())
    trusted = trusts(manifest["files"][native["library"]]["sha256"])
    if (foreign or not trusted) and (kernels := kernels_for(manifest)):
        return Finding(what, True, f"onnxruntime {found}, native kernel of {KERNELS} {kernels.version}")
    if foreign:
        detail = (
            f"onnxruntime {found}, function bodies: the native kernel is for {native['system']} {native['machine']}"
        )
        return Finding(what, True, detail, f"for speed, pip install {KERNELS}, or export with --native here")
    if not trusted:
        detail = f"onnxruntime {found}, function bodies: the native kernel was not built here"
        return Finding(what, True, detail, "for speed, still-export run --trust-native, if you trust its maker")
    return Finding(what, True, f"onnxruntime {found}, native kernel")


def _runs_on_cuda(manifest: dict[str, Any], gpu: str | None) -> Finding:
    what, found = "ONNX Runtime, CUDA", version("onnxruntime-gpu")
    if gpu is None:
        return Finding(what, False, "no NVIDIA GPU here")
    if found is None:
        todo = "pip uninstall onnxruntime; pip install onnxruntime-gpu"
        return Finding(what, False, f"{gpu}, without onnxruntime-gpu", todo)
    archs = (manifest.get("native") or {}).get("archs") or []
    if not archs:
        return Finding(
            what, True, f"{gpu}, onnxruntime-gpu {found}, function bodies: slow", "export with --native --arch"
        )
    return Finding(what, True, f"{gpu}, onnxruntime-gpu {found}, kernels for {', '.join(archs)}")


def _runs_engine(package: Package, gpu: str | None) -> Finding:
    what, found = "TensorRT", version("tensorrt")
    if gpu is None:
        return Finding(what, False, "no NVIDIA GPU here", "copy the package to the machine that shall run it")
    if found is None:
        return Finding(what, False, f"{gpu}, without tensorrt", f"pip install '{DISTRIBUTION}[trt]'")
    build = f"still-export build {package.path}"
    engines = package.manifest["engines"]
    if not engines:
        return Finding(what, False, f"{gpu}, tensorrt {found}, no engine yet", build)
    built = ", ".join(f"TensorRT {e['tensorrt']} for {'/'.join(e['archs'])}" for e in engines)
    arch = f"sm_{Driver().architecture}"
    fits = any(e["tensorrt"] == found and arch in e["archs"] for e in engines)
    return Finding(what, fits, f"{gpu} ({arch}), tensorrt {found}; built by {built}", "" if fits else build)


def _memory_bytes() -> int:
    """Memory of this machine; 0 if unknown."""
    memory: Callable[[str], int] = getattr(os, "sysconf", lambda name: 0)
    return memory("SC_PHYS_PAGES") * memory("SC_PAGE_SIZE")


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, str]:
    memory = f"{_memory_bytes() / 1e9:.0f} GB"
    return {
        "still-export": version(DISTRIBUTION) or "not installed",
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors, {memory}",
        "processor": _processor(),
        "GPU": find_gpu() or "none",
        "onnxruntime": version("onnxruntime") or version("onnxruntime-gpu") or "none",
        "torch": version("torch") or "none",
        "transformers": version("transformers") or "none",
    }
