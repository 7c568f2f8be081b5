"""Accepts a GGUF file where a package is expected: it is exported once, with the file's own bits, into the cache."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from still_export.cli.output import Output, command_line
from still_export.folders.sources import demand_package, gguf_architecture
from still_export.package.files import is_gguf


def package_of(path: Path, out: Output) -> Path:
    """The package at `path`. A GGUF file is exported into the cache first, once for each version of the file, and again if the cached
    package is incomplete or has another version's format.

    Raises:
        StillExportError: The file cannot be exported.
    """
    if not is_gguf(path):
        return path
    demand_package(path, "run")
    from still_export.gguf.architectures import find_architecture

    if architecture := gguf_architecture(
        path
    ):  # before PyTorch is imported and the tokenizer is read, which take seconds
        find_architecture(path, architecture)
    from still_export import __version__
    from still_export.cli.export import report_rounding
    from still_export.errors import PackageError
    from still_export.folders.gguf_description import quantize_policy
    from still_export.gguf.container import open_gguf
    from still_export.graph.options import ExportOptions
    from still_export.package.cache import cache_folder
    from still_export.package.folder import open_package
    from still_export.targets.export import export

    # Links stay: their targets in Hugging Face's cache have neither suffix nor neighbouring parts.
    path = Path(os.path.abspath(path))
    file = open_gguf(path)
    parts = [(str(part), part.stat().st_mtime_ns, part.stat().st_size) for part in file.parts]
    key = hashlib.sha256(repr((__version__, parts)).encode()).hexdigest()[:16]
    folder = cache_folder() / "packages" / f"{path.stem}-{key}"
    if folder.exists():
        try:
            open_package(folder, check_hashes=False)  # the runner compares them
            return folder
        except PackageError as error:
            out.log(f"{error} It is exported again.")
            shutil.rmtree(folder)
    out.log(f"exporting {path} to {folder}, once")
    folder.parent.mkdir(parents=True, exist_ok=True)
    options = ExportOptions(str(path), quantize=quantize_policy(file))
    with out.steps() as progress:
        package = export(options, folder, to="onnx", command=command_line(), progress=progress)
    report_rounding(package, out)
    return folder
