"""The build verb: TensorRT and TensorRT-RTX engines of a package."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from still_export.engines.builder import TIMING_CACHE, EngineBuilder
from still_export.engines.builder_log import Progress
from still_export.engines.builder_rtx import RtxBuilder
from still_export.engines.builder_trt8 import Trt8Builder
from still_export.engines.row_check import WrongEngineError, check_rows
from still_export.errors import PackageError
from still_export.extras import installation
from still_export.options import option
from still_export.package.folder import BEFORE, GENERATED, MANIFEST, Package, open_package, write_manifest
from still_export.package.trust import trust
from still_export.runtime.tensorrt import TrtModel
from still_export.runtime.trt_engine import TrtError, import_tensorrt
from still_export.targets.target import BuildError, NoBuilderError
from still_export.targets.trt.options import RtxOptions, TrtOptions

RECORDS = {record.target: record for record in (TrtOptions, RtxOptions)}


EXPORTED = "as exported"


@dataclass(frozen=True)
class BuildOptions:
    """Changes to the export's settings; None keeps a setting. Each field is a flag of `still-export build`."""

    plugin: Path | None = option(None, "Plugin library to use instead of the package's.")
    batch: int | None = option(None, "Most sequences at once.", shown=EXPORTED)
    prefill_tokens: int | None = option(None, "Tokens of one prefill call.", shown=EXPORTED)
    workspace_mib: int | None = option(None, "Limit of TensorRT's workspace, MiB.", flag="--workspace", shown=EXPORTED)
    optimization_level: int | None = option(None, "Effort of TensorRT's builder, 0 to 5.", shown="3")


def build_engines(
    package: Package, options: BuildOptions | None = None, progress: Progress | None = None
) -> list[Path]:
    """Build the engines of a package in place, and record them in its manifest.

    Raises:
        NoBuilderError: There is no TensorRT or no GPU.
        BuildError: The graph was refused, a still node did not become a plugin layer, or rows of a batch differ from rows alone;
            build.log has TensorRT's messages.
    """
    options, say = options or BuildOptions(), progress or (lambda step: None)
    manifest = package.manifest
    if manifest.get("target") not in RECORDS:
        raise PackageError(
            f"{package.path} is a package for {manifest.get('target')}, which has no engines. "
            f"Make one that has: still-export lower {package.path} --to trt -o TRT"
        )
    names = ("batch", "prefill_tokens", "workspace_mib", "optimization_level")
    changes = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    trt = RECORDS[manifest["target"]].from_manifest(manifest, **changes)
    module = load_tensorrt(trt, package.path)
    try:
        with _restored_on_failure(package):
            with _builder_class(module, trt)(module, package, trt, say) as builder:
                entries = builder.build(options.plugin)
            say("hashing")
            content = {k: v for k, v in manifest.items() if k not in GENERATED}
            content.update(engines=entries, prefill_tokens=trt.prefill_tokens)
            engines = [entry["file"] for entry in entries]
            write_manifest(package.path, content, {k: v for k, v in manifest["files"].items() if k not in engines})
            for name in engines:
                trust(package.path / name)
            if trt.builds_here:
                say("comparing rows of a batch with rows alone")
                _check_rows(package.path, options.plugin, trt.batch)
    except WrongEngineError as error:
        raise BuildError(
            f"{error} It was removed. TensorRT chooses other kernels if {package.path / TIMING_CACHE} is deleted, or with another "
            "--batch, --prefill-tokens or --optimization-level."
        ) from error
    except OSError as error:
        raise BuildError(
            f"cannot write into {package.path}: {error.strerror or error}. Free space, or copy the package to a writable folder."
        ) from error
    return [package.path / entry["file"] for entry in entries]


def _builder_class(module: Any, trt: TrtOptions) -> type[EngineBuilder]:
    if not trt.builds_here:
        return RtxBuilder
    return EngineBuilder if int(module.__version__.split(".")[0]) >= 10 else Trt8Builder


@contextlib.contextmanager
def _restored_on_failure(package: Package) -> Iterator[None]:
    """Save manifest and engines while others are built, and restore them if those are wrong."""
    folder, engines = package.path / BEFORE, [entry["file"] for entry in package.manifest["engines"]]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        shutil.copyfile(package.path / MANIFEST, folder / MANIFEST)
        for name in engines:
            with contextlib.suppress(OSError):  # the engine is missing, or the file system has no links
                os.link(package.path / name, folder / name)
        try:
            yield
        except WrongEngineError:
            for entry in reopen(package.path).manifest["engines"]:
                (package.path / entry["file"]).unlink()
            for file in folder.iterdir():
                os.replace(file, package.path / file.name)
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def discard_staged(package: Path) -> None:
    """Remove the temporary files of an interrupted build."""
    shutil.rmtree(package / BEFORE, ignore_errors=True)
    for part in package.glob(".*.part"):
        part.unlink(missing_ok=True)


def _check_rows(path: Path, plugin: Path | None, batch: int) -> None:
    """Raise unless the engine runs on this machine and computes rows of a batch like rows alone."""
    try:
        model = TrtModel(path, plugin)
        for rows in {min(2, batch), batch}:
            check_rows(model, rows)
    except WrongEngineError:
        raise
    except TrtError as error:
        raise BuildError(f"the engine was built, but does not run here: {error}") from error


def load_tensorrt(trt: TrtOptions, package: Path) -> Any:
    """TensorRT's Python module.

    Raises:
        NoBuilderError: It is not installed, or needs a GPU and there is none.
    """
    name = trt.module
    again = f"Run on a machine that has it: still-export build {package}"
    try:
        module = import_tensorrt(name)
    except ImportError as error:
        raise NoBuilderError(
            f"the Python module {name} is not installed ({error}): {installation(name)}. {again}"
        ) from error
    if trt.builds_here and not has_gpu():
        raise NoBuilderError(f"no CUDA device: TensorRT builds engines on the GPU that runs them. {again}")
    return module


def has_gpu() -> bool:
    from still_export.runtime.cuda_driver import CudaError, Driver

    try:
        return Driver.device_count() > 0
    except CudaError:
        return False


def reopen(path: Path) -> Package:
    """Open the package at `path` without checking hashes: a build reads the graph, which TensorRT checks."""
    if not (path / MANIFEST).is_file():
        raise PackageError(
            f"{path} has no {MANIFEST}: it is no exported package. Make one: still-export MODEL --to trt -o PACKAGE"
        )
    return open_package(path, check_hashes=False, check_engines=False)
