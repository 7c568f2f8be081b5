"""A GGUF file instead of a package: it is exported once with its own bits and cached."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from still_export.cli.output import Output, command_line


def package_of(path: Path, out: Output) -> Path:
    """The package at `path`, or the one exported from a GGUF file, cached until the file changes.

    Raises:
        StillExportError: The file cannot be exported.
    """
    if path.suffix != ".gguf" or not path.is_file():
        return path
    from still_export import __version__
    from still_export.folders.gguf_description import quantize_policy
    from still_export.gguf.container import open_gguf
    from still_export.graph.options import ExportOptions
    from still_export.targets.export import export
    from still_export.targets.ort.headers import cache_folder

    path = Path(os.path.abspath(path))  # links stay: targets of links in Hugging Face's cache have no suffix
    file = open_gguf(path)
    parts = [(str(part), part.stat().st_mtime_ns, part.stat().st_size) for part in file.parts]
    key = hashlib.sha256(repr((__version__, parts)).encode()).hexdigest()[:16]
    folder = cache_folder() / "packages" / f"{path.stem}-{key}"
    if not (folder / "manifest.json").is_file():
        out.log(f"exporting {path} to {folder}, once")
        folder.parent.mkdir(parents=True, exist_ok=True)
        asked = ExportOptions(str(path), quantize=quantize_policy(file))
        with out.steps() as progress:
            export(asked, folder, to="onnx", command=command_line(), progress=progress)
    return folder
