"""GGUF files as containers: keys and tensors of one file, or of all parts of a split one."""

from __future__ import annotations

import functools
import logging
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from still_export.errors import CheckpointError, UnsupportedModelError
from still_export.package.files import begins_another

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Keys under general.sampling, and transformers' names."""
_OF_OTHERS = ("penalty_last_n", "xtc_threshold", "mirostat_tau", "mirostat_eta")
"""Keys that have no effect without others."""
_PIECES = {"unknown": 0, "bos": 1, "eos": 2}
_LIBRARY_ERRORS = (
    *(ValueError, IndexError, KeyError, OSError, OverflowError, TypeError, MemoryError, RecursionError, struct.error),
)


@dataclass(frozen=True)
class Container:
    """Keys of a model's first file, and tensors of all its files by name.

    Args:
        path: The file that was named.
    """

    path: Path
    parts: tuple[Path, ...]
    fields: Mapping[str, Any]
    tensors: Mapping[str, Any]

    def value(self, name: str, *default: Any) -> Any:
        """The value of a key.

        Raises:
            CheckpointError: It is missing, and there is no default.
        """
        field = self.fields.get(name)
        if field is None:
            if default:
                return default[0]
            raise CheckpointError(f"{self.path} lacks the key {name}. It is incomplete; fetch it again.")
        return field.contents()

    def token(self, name: str) -> int | None:
        """The id of a special token; of sentence pieces, llama.cpp's where the file names none."""
        pieces = self.value("tokenizer.ggml.model", "") == "llama"
        default = _PIECES.get(name) if pieces else None
        tokens = self.fields.get("tokenizer.ggml.tokens")
        if default is not None and (tokens is None or default >= len(tokens.contents(slice(default + 1)))):
            default = None
        found: int | None = self.value(f"tokenizer.ggml.{name}_token_id", default)
        return found

    def scale(self, name: str) -> np.ndarray | None:
        """Factors of a whole weight, float32 [1] or one for each expert, which llama.cpp's converter puts beside NVFP4; None: none.

        The scale of its inputs (`.input_scale`), for products in 4 bits, changes no weight.
        """
        tensor = self.tensors.get(f"{name.removesuffix('.weight')}.scale") if name.endswith(".weight") else None
        return None if tensor is None else np.asarray(tensor.data, np.float32).reshape(-1)

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling settings that the file recommends, in the fields of generation_config.json."""
        found: dict[str, Any] = {}
        for key, name in _SAMPLING.items():
            value = self.value(f"general.sampling.{key}", None)
            if value is not None:
                found[name] = value if isinstance(value, int) else float(str(np.float32(value)))
        others = [
            f"{key}={value}"
            for key in self.fields
            if key.startswith("general.sampling.")
            and key.removeprefix("general.sampling.") not in (*_SAMPLING, "sequence", *_OF_OTHERS)
            and (value := self.value(key))
        ]
        if others:
            logging.getLogger(__name__).warning(
                "%s sets %s, which no program here applies", self.path, ", ".join(others)
            )
        if found:
            found["do_sample"] = found.get("temperature", 1.0) != 0
        if not found.get("do_sample", True):  # greedy, where the others have no effect
            found = {"do_sample": False}
        return found

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.value("general.architecture"))


def open_gguf(path: Path) -> Container:
    """Open the file at `path` and, if it is split, all other parts.

    Raises:
        CheckpointError: A file is not an intact GGUF file, or a part or the gguf package is missing.
        UnsupportedModelError: The file has no language model.
    """
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"reading {path} needs the package gguf. Run: pip install 'still-export[gguf]'."
        ) from error
    stamps = tuple((part, *_stamp(part)) for part in _parts(path))
    return _open(gguf.GGUFReader, path, stamps)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise CheckpointError(
            f"{path} is missing: the model is split into parts, and all are needed. Fetch that part."
        ) from error
    return stat.st_mtime_ns, stat.st_size


def _parts(path: Path) -> list[Path]:
    """All parts of the model with a file `path`, by its name."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    return [path.with_name(f"{match[1]}-{number:05d}-of-{count:05d}{match[4]}") for number in range(1, count + 1)]


@functools.lru_cache(maxsize=1)
def _open(open_file: type, path: Path, stamps: tuple[tuple[Path, int, int], ...]) -> Container:
    """Read the files in their current state, once: tokenizer and weights are loaded one after the other."""
    paths = tuple(part for part, *_ in stamps)
    readers = [_reader(open_file, part) for part in paths]
    fields = dict(readers[0].fields)
    count = fields["split.count"].contents() if "split.count" in fields else 1
    if count > 1 and count != len(paths):
        raise CheckpointError(
            f"{path} is one of {count} parts of a split model (split.count), but is not named NAME-00001-of-{count:05d}.gguf, which "
            "locates the others. Restore the original names."
        )
    for number, (part, reader) in enumerate(zip(paths, readers, strict=True)):
        field = reader.fields.get("split.no")
        if len(paths) > 1 and field is not None and field.contents() != number:
            raise CheckpointError(
                f"{part} is part {field.contents() + 1} by its key split.no. The parts' names were exchanged; fetch the model again."
            )
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    expected = fields["split.tensors.count"].contents() if "split.tensors.count" in fields else None
    total = sum(len(reader.tensors) for reader in readers)
    if total != len(tensors) or (expected is not None and count > 1 and expected != total):
        raise CheckpointError(
            f"{path} and its other parts have {len(tensors)} tensors, not {expected or total} (split.tensors.count). A part is of another "
            "model; fetch the model again."
        )
    if "general.architecture" not in fields:
        raise CheckpointError(f"{path} lacks the key general.architecture. It is not a model; fetch it again.")
    kind = fields["general.type"].contents() if "general.type" in fields else "model"
    if kind != "model":
        raise UnsupportedModelError(
            f"{path} has no language model but {kind!r} (general.type). Give the model's own file; adapters are read as PEFT folders."
        )
    return Container(path, paths, fields, tensors)


def _reader(open_file: type, path: Path) -> Any:
    from gguf import GGUFValueType

    class Reader(open_file):  # type: ignore[misc, valid-type]
        """Reads fields as plain arrays, and lists at once: a memory map for each part of a vocabulary is slow."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: str | None = None) -> np.ndarray:
            kind = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
            return np.frombuffer(self.data, kind, int(count), int(offset))

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            outer = GGUFValueType(raw_type)
            inner = GGUFValueType(self._get(orig_offs, np.uint32)[0]) if outer == GGUFValueType.ARRAY else outer
            if inner == outer:
                found: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
                return found
            count, at = int(self._get(orig_offs + 4, np.uint64)[0]), int(orig_offs) + 12
            if inner != GGUFValueType.STRING:
                values = self._get(at, self.gguf_scalar_to_np[inner], count)
                return 12 + values.nbytes, [values], [0], [outer, inner]
            data, words = memoryview(self.data), []
            size_at = struct.Struct(">Q" if np.dtype(np.uint64).newbyteorder(self.byte_order).str[0] == ">" else "<Q")
            for _ in range(count):
                end = at + 8 + size_at.unpack_from(data, at)[0]
                words.append(data[at + 8 : end])
                at = end
            if at > len(data):
                raise ValueError(f"a text ends at byte {at:,}, behind the end of the file")
            return at - int(orig_offs), words, list(range(count)), [outer, inner]

    try:
        with path.open("rb") as file:
            head = file.read(1024)
        if instead := begins_another(head):
            raise CheckpointError(f"{path} is {instead}.")
        if head[:4] != b"GGUF":
            raise ValueError(f"it starts with {head[:4]!r}, not b'GGUF'")
        return Reader(path)
    except _LIBRARY_ERRORS as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size:,} bytes) is not an intact GGUF file: {error}. It is truncated or damaged; fetch it again."
        ) from error


class Keys:
    """The keys of a model's architecture. It remembers the keys that were read, because an unread key may change numbers."""

    def __init__(self, file: Container, prefix: str) -> None:
        self.file, self.prefix = file, f"{prefix}."
        self._read: set[str] = set()

    def __call__(self, name: str, *default: Any) -> Any:
        self._read.add(name)
        return self.file.value(self.prefix + name, *default)

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.file.fields

    def whole(self, name: str, *default: int) -> int:
        """An integer; not one per layer.

        Raises:
            UnsupportedModelError: The value is a list.
        """
        value = self(name, *default)
        if not isinstance(value, int):
            raise UnsupportedModelError(
                f"{self.prefix}{name} in {self.file.path} has a value for each layer; only one for all is supported."
            )
        return value

    def number(self, name: str, *default: float) -> float:
        """A number stored as float32. The intended value is the shortest decimal that rounds to it."""
        return float(str(np.float32(self(name, *default))))

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Keys that were not read, without prefix, with their values."""
        for full, field in self.file.fields.items():
            if full.startswith(self.prefix) and (name := full.removeprefix(self.prefix)) not in self._read:
                yield name, field.contents()
