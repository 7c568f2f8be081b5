"""Snapshots of a model's state, so that a long text is read once and used in many prompts, in this process or a later one."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from still_export.package.locks import LOCKS, hold, is_held, locked
from still_export.runtime.base import Runner
from still_export.runtime.sampling import RunError

FORMAT = "still-export state 1"
MOST_HEADER = 100_000_000
"""Bytes, as safetensors has it."""
TYPES = {
    "F32": "<f4",
    "F16": "<f2",
    "U16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}
PLACES = ("text", "user", "answer")


@dataclass(frozen=True)
class Snapshot:
    """The state of a model's single sequence after `length` tokens.

    arrays: State tensors by name, cut to the used rows; bfloat16 as uint16.
    package: `digest` of package and adapter.
    place: Where the text stops: in plain "text", inside a "user" message of a chat, after an "answer".
    unread: Last tokens of the text, which the model has not read.
    tokens: Read tokens, if known.
    """

    arrays: dict[str, np.ndarray]
    length: int
    package: str
    place: str = "text"
    unread: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: Runner, place: str = "text", unread: tuple[int, ...] = ()) -> Snapshot:
        """The state of the single sequence of `model`.

        Raises:
            RunError: The model needs whole prompts.
        """
        if model.feeding.whole_prompts:
            raise RunError(
                "this model decides by a whole prompt, so none goes on from a kept state. Give all of it with each call."
            )
        arrays = {name: array.copy() for name, array in model.take().items()}
        return cls(arrays, int(model.length[0]), digest(model), place, unread)

    def restore(self, model: Runner, more: int = 0) -> None:
        """Let `model` go on from here, with room for `more` tokens.

        Raises:
            RunError: It is of another package.
        """
        if self.package != digest(model):
            raise RunError(
                "this state is of another package, another export of the model, or another adapter. "
                "Read the text again: still-export run DIR --prompt-file TEXT --save-state FILE"
            )
        model.load(self.arrays, np.array([self.length]), more)

    def save(self, path: Path | str) -> None:
        """Write a safetensors file with the hash of its content; whoever ends meanwhile leaves what was there before.

        Raises:
            RunError: The disk is full, or the file cannot be written.
        """
        described: dict[str, Any] = {"length": self.length, "package": self.package, "place": self.place}
        described |= {"unread": list(self.unread), "tokens": list(self.tokens), "sha256": self._hash()}
        path = Path(os.path.realpath(path))  # what a link names is replaced, not the link
        part = path.with_name(f"{path.name}.{secrets.token_hex(6)}.part")
        try:
            sweep(path.parent, glob.escape(path.name))
            with contextlib.ExitStack() as stack:
                with locked(path.parent):
                    file = stack.enter_context(part.open("wb"))
                    hold(file.fileno())
                _write(file, self.arrays, {"format": FORMAT, "still_export": json.dumps(described)})
                file.flush()
                os.fsync(file.fileno())
                if not LOCKS:
                    file.close()  # Windows renames no open file
                part.replace(path)
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error}. Free space, or choose another file.") from error
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def key(self) -> tuple[int, ...]:
        """Numbers that no vocabulary has, and no other state."""
        return tuple(
            int(number) | 1 << 30 for number in np.frombuffer(bytes.fromhex(self._hash()[:32]), np.int32) & 0x3FFFFFFF
        )

    def _hash(self) -> str:
        """Hash of all fields."""
        found = hashlib.sha256(repr((self.length, self.package, self.place, self.unread, self.tokens)).encode())
        for name, array in sorted(self.arrays.items()):
            found.update(f"{name} {array.dtype} {array.shape}".encode())
            found.update(array.tobytes())
        return found.hexdigest()

    @classmethod
    def load(cls, path: Path | str) -> Snapshot:
        """Read what `save` wrote.

        Raises:
            RunError: The file is none, or damaged.
        """
        arrays: dict[str, np.ndarray] = {}
        described = cls.describe(path, arrays)
        read, tokens = tuple(described["unread"]), tuple(described.get("tokens", ()))
        found = cls(arrays, described["length"], described["package"], described["place"], read, tokens)
        if described.get("sha256") not in (None, found._hash()):  # a browser's file has none
            raise RunError(
                f"{path} is damaged: its content has another SHA-256 than it says. "
                "Read the text again: still-export run DIR --prompt-file TEXT --save-state FILE"
            )
        return found

    @staticmethod
    def describe(path: Path | str, arrays: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
        """The fields of a file: length, package, place, unread, and, if known, tokens and sha256.

        Args:
            arrays: Filled with the state itself.

        Raises:
            RunError: The file is none.
        """
        wrong = RunError(f"{path} is no saved state: make one with `still-export run PACKAGE --save-state`.")
        try:
            metadata = _read(Path(path), arrays)
            if metadata.get("format") != FORMAT:
                raise wrong
            described: Any = json.loads(metadata["still_export"])
            numbers = [described["length"], *described["unread"], *described.get("tokens", ())]
            whole = all(type(n) is int and 0 <= n < 1 << 40 for n in numbers)
            if not whole or described["place"] not in PLACES or not isinstance(described["package"], str):
                raise wrong
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror or error}.") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if error is wrong:
                raise
            raise wrong from error
        return dict(described)


def _write(file: BinaryIO, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file. The library's own writer puts another file in the place of an open and locked one."""
    names = {np.dtype(kind): name for name, kind in TYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    # The library asks for the largest types first, so that every tensor is aligned.
    ordered = dict(sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0])))
    start = 0
    for name, array in ordered.items():
        header[name] = {
            "dtype": names[array.dtype],
            "shape": array.shape,
            "data_offsets": [start, start + array.nbytes],
        }
        start += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for array in ordered.values():
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _read(path: Path, arrays: dict[str, np.ndarray] | None) -> dict[str, str]:
    """Metadata of a safetensors file; `arrays` is filled with its tensors. Boxes that only run packages have no safetensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MOST_HEADER:
            raise ValueError(f"header of {length} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
        metadata: dict[str, str] = header.pop("__metadata__", {})
        if arrays is None:
            return metadata
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if not 0 <= start <= end <= path.stat().st_size:
                raise ValueError(f"{name} has bytes {start} to {end}")
            file.seek(8 + length + start)
            arrays[name] = np.frombuffer(file.read(end - start), TYPES[entry["dtype"]]).reshape(entry["shape"]).copy()
    return metadata


def sweep(folder: Path, pattern: str) -> None:
    """Remove what killed processes left of files like `pattern`; a living one has its own locked."""
    if not LOCKS or not (parts := list(folder.glob(f"{pattern}.*.part"))):
        return
    with locked(folder):
        for part in parts:
            with contextlib.suppress(OSError), part.open("rb") as file:
                if is_held(file.fileno()) is False:
                    part.unlink()


def digest(model: Runner) -> str:
    """Hash of what a state's numbers depend on: the portable package and the adapter. Packages lowered from one portable package can
    continue each other's states."""
    # Packages of older versions have no state_identity.
    identity = model.manifest.get("state_identity") or model.manifest["files"]
    parts = [identity, *([model.adapter] if model.adapter else [])]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
