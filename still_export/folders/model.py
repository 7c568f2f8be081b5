"""A model as its user names it, and checks of its small files before torch is imported, which takes seconds."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import stat
from collections.abc import Iterable, Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from still_export.discovery import recognised, systems
from still_export.errors import CheckpointError, ConfigError, ModelNotFoundError, UnsupportedModelError
from still_export.folders.adapter_config import ADAPTER_CONFIG, read_adapter_config
from still_export.folders.families import LINEAR, NEWER, NOT_COVERED, SOFTMAX, TEXT_OF, whole_config
from still_export.folders.files import Config, Files
from still_export.folders.origin import CARD, card_origin, gguf_origin
from still_export.folders.tokenizer import read_folder_tokenizer
from still_export.folders.weights import PICKLE_SUFFIXES, refuse_pickle, weight_files
from still_export.gguf.container import open_gguf
from still_export.gguf.tokenizer import read_tokenizer
from still_export.package.files import is_gguf
from still_export.package.refusals import first_line

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", CARD]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SPECIAL = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class ModelFolder(Files):
    """A model or adapter on disk with its overlays, passed on by whoever opened it, so that each file is opened once.

    Attributes:
        path: Its folder.
        place: The folder, or the GGUF or safetensors file, that was named.
        name: The user's name of it.
        added: Names of overlays, which are added to it: adapters, feature maps.
    """

    def __init__(self, place: Path, name: str | Path = "", added: Iterable[str | Path | ModelFolder] = ()) -> None:
        super().__init__(place.parent if place.is_file() else place)
        self.place, self.name, self.added = place, str(name or place), tuple(added)

    @classmethod
    def open(
        cls, source: str | Path | ModelFolder, revision: str | None = None, overlays: Sequence[str | Path] = ()
    ) -> ModelFolder:
        """The model named `source`; one that is open stays as it is.

        Raises:
            ModelNotFoundError, CheckpointError: See `resolve_source`.
        """
        if isinstance(source, ModelFolder):
            return source
        return cls(resolve_source(source, revision), source, overlays)

    def __str__(self) -> str:
        return self.name

    @property
    def is_file(self) -> bool:
        return self.place.is_file()

    @cached_property
    def overlays(self) -> tuple[ModelFolder, ...]:
        return tuple(map(self.open, self.added))

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, checked; errors: see `check_folder`, and ConfigError for a field's value."""
        check_folder(self)
        found: dict[str, Any] = _with_infinities(self.json("config.json", Config, ConfigError))
        return found

    @cached_property
    def adapter(self) -> dict[str, Any] | None:
        """adapter_config.json; None: there is none."""
        return read_adapter_config(self) if self.has(ADAPTER_CONFIG) else None

    @cached_property
    def origin(self) -> dict[str, Any]:
        """What authors state: `name`, `license`, `base_model` and others where stated; `overlays`: the same of overlays."""
        found = gguf_origin(open_gguf(self.place).fields) if is_gguf(self.place) else card_origin(self)
        overlays = [overlay.origin for overlay in self.overlays if overlay.origin]
        return {**found, **({"overlays": overlays} if overlays else {})}

    @cached_property
    def weights(self) -> list[Path]:
        """Safetensors files; errors: see `weight_files`."""
        return [self.place] if self.is_file else weight_files(self)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer by transformers; batches are padded on the right.

        Raises:
            ModelNotFoundError: The model has none.
            CheckpointError: It is damaged.
            UnsupportedModelError: A GGUF file's is of a kind that is not covered.
        """
        if self.is_file:
            tokenizer = read_tokenizer(self.place)
        else:
            self.check_tokenizer()
            if self.has("config.json"):
                self.config  # noqa: B018  transformers reads it for the tokenizer, too, and would blame the tokenizer
            tokenizer = read_folder_tokenizer(self, self.name)
        tokenizer.padding_side = "right"
        return tokenizer


def _with_infinities(value: Any) -> Any:
    """`value` with transformers' JSON form of infinities replaced: {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if set(value) == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {name: _with_infinities(x) for name, x in value.items()}
    return [_with_infinities(x) for x in value] if isinstance(value, list) else value


def local(source: str | Path) -> Path | None:
    """The file or folder named `source`; None: it is a hub id.

    Raises:
        ModelNotFoundError: The name is empty, or nothing has it.
        CheckpointError: It is or contains a named pipe, a device or a socket; reading one may never end.
    """
    if not str(source) or not str(source).strip():
        raise ModelNotFoundError(
            "the model is an empty text. Give a Hugging Face model folder, a hub id or a .gguf file."
        )
    path = Path(os.path.expanduser(source))  # unchanged without a home folder
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:  # such as a name that is too long
        raise ModelNotFoundError(f"{str(source)[:200]!r} is no path: {error}.") from None
    if exists:
        refuse_special(path)
        return path
    if not isinstance(source, str) or not _HUB_ID.fullmatch(source):
        raise ModelNotFoundError(
            f"{source} does not exist. Give a Hugging Face model folder, a hub id (org/name) or a .gguf file."
        )
    return None


def refuse_special(path: Path) -> None:
    """Raise CheckpointError if `path`, or an entry up to two levels below it, is neither file nor folder."""
    entries = [path]
    for folder in (path, *(sorted(path.iterdir()) if path.is_dir() else ())):
        if folder.is_dir() and not (folder is not path and folder.is_symlink()):
            entries += sorted(folder.iterdir())
    for entry in entries:
        try:
            kind = stat.S_IFMT(entry.stat().st_mode)
        except OSError:  # a broken link; the reader of the file reports it
            continue
        if kind in _SPECIAL:
            raise CheckpointError(f"{entry} is {_SPECIAL[kind]}, not a file, so nothing is read here. Remove it.")


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
            f"{first_line(error)} "
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


def check_model(source: str | Path | ModelFolder, revision: str | None = None, here: bool = True) -> None:
    """Raise the errors of a model's readers as far as its small files show them. Hub ids are not checked, unless one looks like a misspelt
    folder.

    Args:
        here: Whether this project reads the model; otherwise transformers does, which has other families.

    Raises:
        ModelNotFoundError, CheckpointError: See `resolve_source` and `check_folder`; or weights are missing.
        UnsupportedModelError: No family has its model_type.
    """
    if not isinstance(source, ModelFolder) and local(source) is None and not _meant(str(source)):
        return
    folder = ModelFolder.open(source, revision)
    if folder.is_file:
        check_file(folder.place)
        return
    check_folder(folder)
    if here:
        check_family(recognised(whole_config(folder, folder.json("config.json"))))
        folder.weights  # noqa: B018  raises what is wrong with them


def check_overlay(source: str | Path | ModelFolder) -> None:
    """Raise if an adapter's configuration is damaged or unsupported; hub ids are not checked."""
    if not isinstance(source, ModelFolder) and local(source) is None:
        return
    folder = ModelFolder.open(source)
    folder.adapter, folder.weights  # noqa: B018  raise what is wrong with them


def check_file(path: Path) -> None:
    """Raise ModelNotFoundError unless the file is one of GGUF."""
    if not is_gguf(path):
        raise ModelNotFoundError(f"{path} is a file; a model is a folder with config.json, a hub id, or a .gguf file.")


def check_folder(opened: Files) -> None:
    """Raise if a folder's config.json is missing (ModelNotFoundError) or damaged (CheckpointError), or a link is broken."""
    opened.check_links()
    folder = opened.path
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
    if "model_type" not in opened.json("config.json"):
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
