"""What tests make once for all processes and later runs: in build/tests, by recipe and sources, made under a lock.

A folder belongs to the sources that made it: those of the three packages, of the models of tests, and the versions of the libraries. Those
of other sources are deleted when they are a day old.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "tests"
PLACES = ("still_export", "kernels", "graphs", "tests/still_export", "tests/kept.py")
LIBRARIES = (
    "torch",
    "transformers",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "onnxruntime",
    "triton",
    "safetensors",
    "tokenizers",
)
DAY_S = 86_400.0


def kept(recipe: str, make: Callable[[Path], object]) -> Path:
    """The folder of a recipe, which `make` fills if nobody has: equal recipes are equal folders. Nobody changes what is in it."""
    place = _sources()
    folder = place / hashlib.sha256(recipe.encode()).hexdigest()[:20]
    with FileLock(f"{folder}.lock"):
        if not (folder / "recipe").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
            folder.mkdir()
            make(folder)
            (folder / "recipe").write_text(recipe, encoding="utf-8")
    return folder


@functools.cache
def _sources() -> Path:
    digest = hashlib.sha256(sys.version.encode())
    for name in LIBRARIES:
        digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    for place in PLACES:
        root = ROOT / place
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    found = KEPT / digest.hexdigest()[:20]
    found.mkdir(parents=True, exist_ok=True)
    for other in KEPT.iterdir():
        if other != found and time.time() - other.stat().st_mtime > DAY_S:
            shutil.rmtree(other, ignore_errors=True)
    return found
