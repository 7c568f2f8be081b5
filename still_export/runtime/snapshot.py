"""What a model has read, kept: a long text is read once and asked many times, in this process or a later one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from still_export.runtime.base import Runner
from still_export.runtime.sampling import RunError

FORMAT = "still-export state 1"
PLACES = ("text", "user", "answer")


@dataclass(frozen=True)
class Snapshot:
    """The state of a model's single sequence after `length` tokens.

    arrays: State tensors by name, cut to the rows that hold something; bfloat16 as uint16.
    package: Digest of the files that give the state its meaning.
    place: Where the text stops: in plain "text", inside a "user" message of a chat, after an "answer".
    unread: Tokens that belong to the text and that the model has not read.
    """

    arrays: dict[str, np.ndarray]
    length: int
    package: str
    place: str = "text"
    unread: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: Runner, place: str = "text", unread: tuple[int, ...] = ()) -> Snapshot:
        """What `model` has read in its single sequence."""
        length = int(model.length[0])
        shapes = model.table.shapes(1, model.table.rows(length))
        arrays = {}
        for name, array in model.state_arrays().items():
            part = tuple(slice(0, n) for n in shapes[name])
            arrays[name] = np.ascontiguousarray(array[part])
        return cls(arrays, length, digest(model), place, unread)

    def restore(self, model: Runner, more: int = 0) -> None:
        """Let `model` go on from here, with room for `more` tokens.

        Raises:
            RunError: It is of another package.
        """
        if self.package != digest(model):
            raise RunError(
                "this state is of another package, another export of the model, or another adapter. Read the text again."
            )
        model.load(self.arrays, np.array([self.length]), more)

    def save(self, path: Path | str) -> None:
        """Write a safetensors file."""
        from safetensors.numpy import save_file

        described = {"length": self.length, "package": self.package, "place": self.place, "unread": list(self.unread)}
        save_file(self.arrays, path, metadata={"format": FORMAT, "still_export": json.dumps(described)})

    @classmethod
    def load(cls, path: Path | str) -> Snapshot:
        """Read what `save` wrote.

        Raises:
            RunError: The file is none, or damaged.
        """
        from safetensors import SafetensorError, safe_open

        wrong = RunError(f"{path} is no saved state: make one with `still-export run PACKAGE --save-state`.")
        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise wrong
                arrays = {name: file.get_tensor(name) for name in file.keys()}
            described: Any = json.loads(metadata["still_export"])
            length, place, unread = described["length"], described["place"], described["unread"]
            whole = [n for n in (length, *unread) if type(n) is int and 0 <= n < 1 << 40]
            if len(whole) != 1 + len(unread) or place not in PLACES or not isinstance(described["package"], str):
                raise wrong
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror or error}.") from error
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            if error is wrong:
                raise
            raise wrong from error
        return cls(arrays, length, described["package"], place, tuple(unread))


def digest(model: Runner) -> str:
    """Of graph, weights and adapter, and of the states' types and shapes: what a state's numbers depend on."""
    files = {
        name: entry["sha256"]
        for name, entry in sorted(model.manifest["files"].items())
        if name.endswith((".onnx", ".data"))
    }
    states = [[s.name, s.dtype, list(map(str, s.shape))] for s in model.table]
    parts = [files, states, *([model.adapter] if model.adapter else [])]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
