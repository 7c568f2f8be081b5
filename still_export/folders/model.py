"""Location of a model, and checks of its small files before torch is imported, which takes seconds."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from still_export.discovery import recognised, systems
from still_export.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from still_export.folders.adapter_config import read_adapter_config
from still_export.folders.families import LINEAR, NEWER, NOT_COVERED, TEXT_OF, whole_config
from still_export.folders.files import check_links, read_json
from still_export.folders.weights import PICKLE_SUFFIXES, refuse_pickle, weight_files
from still_export.sources import SOFTMAX, local

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


def resolve_source(source: str | Path, revision: str | None = None) -> Path:
    """The folder or file named `source`; hub ids are fetched into the hub's cache (safetensors and text files only).

    Raises:
        ModelNotFoundError: It is neither a path nor a reachable hub id.
        CheckpointError: It contains a named pipe, a device or a socket.
    """
    path = local(source)
    if path is not None:
        if path.is_file() and path.suffix in PICKLE_SUFFIXES:
            raise refuse_pickle(path)
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(source), revision=revision, allow_patterns=HUB_FILES))
    except Exception as error:  # huggingface_hub, its HTTP client and the network raise many unrelated types
        raise ModelNotFoundError(
            f"{source} is not a folder here and could not be fetched from the hub: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no reason given'} "
            f"Check the name, the network and, for gated models, `hf auth login`.{_meant(str(source))}"
        ) from error


def _meant(source: str) -> str:
    """A question with the local folder whose path is nearly `source`, or ""."""
    paths: list[str] = []
    with contextlib.suppress(OSError):
        for folder in filter(Path.is_dir, Path().iterdir()):
            with contextlib.suppress(OSError):
                paths += [str(entry) for entry in islice(folder.iterdir(), 1000)]
    near = difflib.get_close_matches(source, paths, 1, 0.8)
    return f" Did you mean {near[0]}?" if near else ""


def check_model(source: str | Path, revision: str | None = None, here: bool = True) -> None:
    """Raise the errors of a model's readers as far as its small files show them. Hub ids are not checked, unless one looks like a misspelt
    folder.

    Args:
        here: Whether this project reads the model; otherwise transformers does, which has other families.

    Raises:
        ModelNotFoundError, CheckpointError: See `resolve_source` and `check_folder`; or weights are missing.
        UnsupportedModelError: No family has its model_type.
    """
    if local(source) is None and not _meant(str(source)):
        return
    path = resolve_source(source, revision)
    if path.is_file():
        check_file(path)
        return
    check_folder(path)
    if not here:
        return
    check_family(recognised(whole_config(path, read_json(path / "config.json"))))
    weight_files(path)


def check_overlay(source: str | Path) -> None:
    """Raise if an adapter's configuration is damaged or unsupported; hub ids are not checked."""
    path = local(source)
    if path is None:
        return
    adapter = (path.parent if path.is_file() else path) / "adapter_config.json"
    if adapter.is_file():
        read_adapter_config(adapter)
    if path.is_dir():
        weight_files(path)


def check_file(path: Path) -> None:
    """Raise ModelNotFoundError unless the file is named as a GGUF file."""
    if path.suffix != ".gguf":
        raise ModelNotFoundError(f"{path} is a file; a model is a folder with config.json, a hub id, or a .gguf file.")


def check_folder(folder: Path) -> None:
    """Raise if a folder's config.json is missing (ModelNotFoundError) or damaged (CheckpointError), or a link is broken."""
    check_links(folder)
    path = folder / "config.json"
    if not path.is_file():
        found = sorted(p.name for p in folder.iterdir())[:6]
        hint = f" The folder contains {', '.join(found)}." if found else " The folder is empty."
        ggufs = sorted(folder.glob("*.gguf"))
        todo = (
            f"Name the file itself: {ggufs[0]}."
            if ggufs
            else "Give a Hugging Face model folder, a hub id or a .gguf file."
        )
        raise ModelNotFoundError(f"{folder} is not a model: it has no config.json.{hint} {todo}")
    if "model_type" not in read_json(path):
        raise CheckpointError(f"{path} names no model_type, so the family is unknown. Fetch the model again.")


def is_known(model_type: str) -> bool:
    """Whether the family is known without torch: a family of the project, or of a system with MODEL_TYPES."""
    own = (name for types in _types_of_systems() for name in types or ())
    return model_type.removeprefix("still_") in (*SOFTMAX, *LINEAR, *TEXT_OF, "still", *own)


def check_family(model_type: str) -> None:
    """Raise UnsupportedModelError if no family has `model_type`. Not checked here: families of newer transformers versions, and systems
    without MODEL_TYPES."""
    name = model_type.removeprefix("still_")
    undecided = name in NEWER or (None in _types_of_systems() and name not in NOT_COVERED)
    if not undecided and not is_known(model_type):
        raise not_covered(model_type, SOFTMAX, LINEAR)


def not_covered(model_type: str, softmax: Iterable[str], linear: Iterable[str]) -> UnsupportedModelError:
    """The error for a family outside `softmax` and `linear`."""
    why = NOT_COVERED.get(model_type.removeprefix("still_"))
    what = "is no family that STILL attention is written for" if why is None else f"is not covered: {why}"
    return UnsupportedModelError(
        f"model_type={model_type!r} in config.json {what}. Covered: {', '.join(softmax)} (SmolLM and SmolLM2 are llama); "
        f"as they are: {', '.join(linear)}."
    )


def _types_of_systems() -> list[tuple[str, ...] | None]:
    """MODEL_TYPES of each system with families; None if it has no such list."""
    with_families = [system for system in systems() if find_spec(f"{system}.family")]
    return [getattr(import_module(system), "MODEL_TYPES", None) for system in with_families]
