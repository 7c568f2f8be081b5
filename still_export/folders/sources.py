"""Kind of a user's path: package, model or adapter. Reads only small files, in milliseconds; importing torch and transformers would need
seconds."""

from __future__ import annotations

import os
import shlex
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from still_export.discovery import recognised
from still_export.errors import (
    CheckpointError,
    ConfigError,
    NotLinearizedError,
    PackageError,
    UnsupportedModelError,
)
from still_export.folders.adapter_config import ADAPTER_CONFIG
from still_export.folders.families import COMPANION_FILES, GGUF_SOFTMAX, SOFTMAX
from still_export.folders.model import ModelFolder, local
from still_export.package.files import MANIFEST, is_gguf

_MOST_GGUF_HEADER = 16 << 20
_GGUF_TEXT, _GGUF_ARRAY = 8, 9
_GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by GGUF's code of its type."""
_MAPS = ("feature_map_", "window_factors")
"""Parts of tensor names that only linearized models have."""


@dataclass(frozen=True)
class Found:
    """Kind of a path.

    Attributes:
        kind: "none" is anything else, such as an empty folder.
        model_type: For models. dtype: Type of the weights in config.json; "": not stated.
        base: For adapters: the base model, as named in the adapter.
        folder: Its files, as far as they were read; None for a hub id.
    """

    path: Path
    kind: Literal["package", "model", "adapter", "hub", "none"]
    model_type: str = ""
    base: str = ""
    dtype: str = ""
    folder: ModelFolder | None = None


def look(source: str | Path) -> Found:
    """Determine the kind of `source`.

    Raises:
        ModelNotFoundError, CheckpointError: See `local`.
    """
    path = local(source)
    if path is None:
        return Found(Path(source), "hub")
    folder = ModelFolder(path, source)
    if path.is_file():
        if not is_gguf(path):
            return Found(path, "none", folder=folder)
        architecture = gguf_architecture(path)
        return Found(path, "model", GGUF_SOFTMAX.get(architecture, architecture), folder=folder)
    if "format_version" in folder.known(MANIFEST):
        return Found(path, "package", folder=folder)
    if folder.has("config.json"):
        config = folder.known("config.json")
        text = config.get("text_config")
        inner = str(text.get("model_type", "")) if isinstance(text, dict) else ""
        became = (kind for name, (kind, _) in COMPANION_FILES.items() if folder.has(name))
        model_type = next(became, recognised(config))
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
        return Found(path, "model", inner if inner in SOFTMAX else model_type, dtype=dtype, folder=folder)
    if folder.has(ADAPTER_CONFIG):
        base = str(folder.known(ADAPTER_CONFIG).get("base_model_name_or_path") or "")
        return Found(path, "adapter", base=base, folder=folder)
    return Found(path, "none", folder=folder)


GGUF_VERBS = ("run", "serve", "bench", "verify")
"""Verbs that accept a GGUF file instead of a package."""


def demand_package(path: Path, verb: str) -> None:
    """Raise PackageError unless `path` is a package; the message has the command that makes one."""
    if not path.exists():
        raise PackageError(
            f"{path} does not exist. {verb} needs a package. Make one: still-export MODEL --to onnx -o {shlex.quote(str(path))}"
        )
    found = look(path)
    if found.kind == "model" and verb != "inspect" and _is_plain_softmax(found):
        raise _not_linearized(str(path), found.model_type)
    if verb in GGUF_VERBS and found.kind == "model" and path.is_file():
        return
    to = {"lower": "", "build": " --to trt"}.get(verb, " --to onnx")
    if found.kind == "none" and not (path / MANIFEST).exists():
        what = (
            f"has no {MANIFEST}: it is no exported package" if path.is_dir() else "is a file, not an exported package"
        )
        raise PackageError(
            f"{path} {what}. {verb} needs the folder that an export wrote. Make one: still-export MODEL{to} -o PACKAGE"
        )
    if found.kind in ("package", "none") or verb == "inspect":
        return  # readers refuse damaged packages
    name, quoted = os.path.basename(os.path.abspath(path)).removesuffix(".gguf"), shlex.quote(str(path))
    made = shlex.quote(f"{name}-package")
    model = quoted
    if found.kind == "adapter":
        model = f"{shlex.quote(found.base) if found.base else 'BASE'} --overlay {quoted}"
    raise PackageError(
        f"{path} is {'an adapter' if found.kind == 'adapter' else 'a model'}, and {verb} needs a package. Export it first: "
        f"still-export {model}{to} -o {made}, then: still-export {verb} {made}"
    )


def demand_model(source: str, verb: str, overlays: Sequence[str] = (), untrained: bool = False) -> Found:
    """Check that `source` is a model for `verb`; errors have the command to use instead.

    Args:
        overlays: Adapters or feature maps to add to it.
        untrained: Accept a softmax model.

    Raises:
        ConfigError: It is a package or an adapter, or already linearized (for linearize).
        NotLinearizedError: It is a softmax model, but a linearized one is needed.
        UnsupportedModelError: It has no softmax layers (for linearize).
        ModelNotFoundError, CheckpointError: See `local`.
    """
    found = look(source)
    quoted = shlex.quote(source)
    if found.kind == "package" and found.folder is not None:
        made_of = (found.folder.known(MANIFEST).get("config") or {}).get("model")
        to = f"still-export lower {quoted} --to TARGET -o OTHER" if verb == "export" else ""
        if not to:
            to = f"still-export {verb} {shlex.quote(str(made_of or 'MODEL'))}"
        raise ConfigError(f"{source} is an exported package, and {verb} needs a model. Type: {to}")
    if found.kind == "adapter":
        base = shlex.quote(found.base) if found.base else "BASE"
        flag = "--adapter" if verb == "linearize" else "--overlay"
        raise ConfigError(
            f"{source} is an adapter, which changes a base model. Give that model, and the adapter with {flag}: "
            f"still-export {verb} {base} {flag} {quoted}"
        )
    added = [look(overlay) for overlay in overlays]
    for overlay in added:
        if overlay.kind == "package":
            raise ConfigError(
                f"--overlay {overlay.folder} is an exported package. Give an adapter's folder ({overlay.path} is none)."
            )
    if found.folder is not None:
        found.folder.added = tuple(one.folder or name for one, name in zip(added, overlays, strict=True))
    if found.kind != "model":
        return found
    if verb == "linearize":
        if found.model_type.startswith("still_"):
            raise ConfigError(f"{source} is linearized already. Export it: still-export {quoted} --to onnx -o PACKAGE")
        if found.model_type and found.model_type not in SOFTMAX and found.path.is_dir():
            raise UnsupportedModelError(
                f"{source} is a {found.model_type} model, and {verb} needs a softmax model: {', '.join(SOFTMAX)}. If its layers are linear "
                f"already, export it directly: still-export {quoted} --to onnx -o PACKAGE"
            )
    elif verb == "export" and not (overlays or untrained) and _is_plain_softmax(found):
        raise _not_linearized(source, found.model_type)
    return found


def _is_plain_softmax(found: Found) -> bool:
    return found.model_type in SOFTMAX and found.folder is not None and _has_no_maps(found.folder)


def _not_linearized(source: str, model_type: str) -> NotLinearizedError:
    quoted = shlex.quote(source)
    return NotLinearizedError(
        f"{source} is a plain softmax {model_type} model, which this program does not run as it is; llama.cpp and transformers do. "
        f"Linearize it, which trains: still-export linearize {quoted} -o LINEAR, then: still-export LINEAR --to onnx -o PACKAGE; or add an "
        f"adapter that was trained before: still-export {quoted} --overlay ADAPTER --to onnx -o PACKAGE. In the adapter's place "
        "--attach-untrained measures speed; its answers are the base model's only within the first two chunks (128 tokens)."
    )


def gguf_architecture(path: Path) -> str:
    """general.architecture of a GGUF file, wherever it lies in the header; "" if it cannot be read, which the file's reader reports."""
    with path.open("rb") as file:
        head = file.read(_MOST_GGUF_HEADER)
    at = 24

    def value(form: str) -> int:
        nonlocal at
        (found,) = struct.unpack_from(form, head, at)
        at += struct.calcsize(form)
        return int(found)

    def text() -> bytes:
        nonlocal at
        size = value("<Q")
        at += size
        return head[at - size : at]

    def skip(kind: int) -> None:
        nonlocal at
        if kind == _GGUF_TEXT:
            text()
        elif kind == _GGUF_ARRAY:
            kind, count = value("<I"), value("<Q")
            if kind in (_GGUF_TEXT, _GGUF_ARRAY):
                for _ in range(count):
                    skip(kind)
            else:
                at += count * _GGUF_SIZES[kind]
        else:
            at += _GGUF_SIZES[kind]

    try:
        for _ in range(struct.unpack_from("<Q", head, 16)[0] if head[:4] == b"GGUF" else 0):
            key, kind = text(), value("<I")
            if key == b"general.architecture" and kind == _GGUF_TEXT:
                return text().decode("utf-8", "replace")
            skip(kind)
    except (struct.error, KeyError, OverflowError, RecursionError):
        pass
    return ""


def _has_no_maps(folder: ModelFolder) -> bool:
    """Whether the file headers can be read and have no tensors of a linearized model."""
    if folder.is_file:
        return True
    files = sorted(folder.path.glob("*.safetensors"))
    try:
        names = [folder.header(file) for file in files]
    except CheckpointError:
        return False
    return bool(files) and not any(not each or any(part in name for name in each for part in _MAPS) for each in names)
