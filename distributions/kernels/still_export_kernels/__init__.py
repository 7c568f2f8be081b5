"""Kernels of still-export for ONNX Runtime on CPUs, compiled: one library for every package of the same version.

    import onnxruntime, still_export_kernels

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(still_export_kernels.get_library_path())
    session = onnxruntime.InferenceSession("model.onnx", options)

The library has the ops of the domain "still" in float32 and float16 and selects instruction sets at run time. It links nothing of ONNX
Runtime; registering fails with a message if ONNX Runtime is older than 1.25.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["BUILD", "__version__", "get_library_path"]

BUILD: dict[str, Any] = json.loads(Path(__file__).with_name("build.json").read_text(encoding="utf-8"))
"""How the library was built: `version`, `library` (file name), `sha256`, `machine` (such as "x86_64"), `sources` (their SHA-256), `ops`
(versions by name)."""

__version__: str = BUILD["version"]


def get_library_path() -> str:
    """Absolute path of the custom op library, for `onnxruntime.SessionOptions.register_custom_ops_library`."""
    return str(Path(__file__).resolve().with_name(BUILD["library"]))
