"""What a package's files must be before they are opened: listed, inside the folder, unchanged; and native code known to the user.

Standard library only: exports copy this file into packages, for run_ort.py and run_trt.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

FORMAT_VERSION = 2
"""Of manifest.json."""
MANIFEST = "manifest.json"
MODEL = "model.onnx"
PLUGIN = "libstill_tensorrt"
"""How the names of plugin libraries begin."""
DTYPES = ("float32", "float16", "bfloat16")
MOST_ROWS = 1 << 24
MOST_TOKENS = 1 << 40
WHOLE = (1 << 31) - 1
CHAT = ("start", "system_start", "system_to_user", "user_to_assistant", "assistant_to_user")


class RunError(ValueError):
    """The package cannot run this request; the message says why and what to do."""


class CheckError(RunError):
    """A file of the package is not what it must be; the message names the file and, where it has some, the field."""


# The part of the manifest that runners use.


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the package in `folder`, with every field checked that runners use.

    Raises:
        CheckError: There is none, it is damaged, or a field is not what it must be.
    """
    path = inside(folder, MANIFEST)
    if not path.is_file():
        raise CheckError(f"{folder} has no {MANIFEST}: it is no exported package.")
    try:
        manifest = json.loads(path.read_bytes().decode("utf-8"), parse_constant=_no_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckError(f"{path} is not readable ({error}). Copy the package again.") from error
    check = _Check(path)
    version = check.integer(check.table(manifest, ""), "format_version", 1, WHOLE)
    if version != FORMAT_VERSION:
        raise CheckError(other_format(path, manifest))
    check.runner_fields(manifest)
    return dict(manifest)


def other_format(path: Path, manifest: dict[str, Any]) -> str:
    """What to say of a manifest of another format version, with the command that exports the model again."""
    version, command = manifest["format_version"], manifest.get("command")
    if isinstance(version, int) and version > FORMAT_VERSION:
        return f"{path} has format version {version}; this still-export reads {FORMAT_VERSION}. Update still-export."
    again = f": {command}" if isinstance(command, str) and command else "."
    return (
        f"{path} has format version {version}; this still-export reads {FORMAT_VERSION}. Export the model again{again}"
    )


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


class _Check:
    """Looks fields up and says what is wrong with them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def wrong(self, field: str, wanted: str, value: Any) -> CheckError:
        shown = json.dumps(value) if not isinstance(value, (dict, list)) else f"a {type(value).__name__}"
        where = f"{self.path}: {field}" if field else str(self.path)
        return CheckError(f"{where} must be {wanted}, not {shown[:60]}. Copy the package again, or export it again.")

    def get(self, table: dict[str, Any], field: str) -> Any:
        name = field.rsplit(".", 1)[-1]
        if name not in table:
            raise CheckError(f"{self.path}: {field} is missing. Copy the package again, or export it again.")
        return table[name]

    def table(self, value: Any, field: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(field, "an object", value)
        return value

    def items(self, table: dict[str, Any], field: str) -> list[Any]:
        value = self.get(table, field)
        if not isinstance(value, list):
            raise self.wrong(field, "a list", value)
        return value

    def integer(self, table: dict[str, Any], field: str, least: int, most: int) -> int:
        value = self.get(table, field)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(field, f"an integer in {least}..{most}", value)
        return value

    def boolean(self, table: dict[str, Any], field: str) -> bool:
        value = self.get(table, field)
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false", value)
        return value

    def text(self, table: dict[str, Any], field: str, known: Iterable[str] = ()) -> str:
        value = self.get(table, field)
        if not isinstance(value, str) or (known and value not in known):
            raise self.wrong(field, f"one of {', '.join(known)}" if known else "a text", value)
        return value

    def state(self, field: str, state: Any, growths: dict[str, Any]) -> None:
        """One state; `growths` are the rules seen so far, by the dimension that grows."""
        wanted = {"name", "layer", "op", "shape", "dtype", "in_place", "growth"}
        if set(self.table(state, field)) != wanted:
            raise self.wrong(field, f"an object of {', '.join(sorted(wanted))}", state)
        for name in ("name", "op"):
            self.text(state, f"{field}.{name}")
        self.integer(state, f"{field}.layer", 0, MOST_ROWS)
        self.text(state, f"{field}.dtype", (*DTYPES, "int64"))
        self.boolean(state, f"{field}.in_place")
        shape, growth = self.items(state, f"{field}.shape"), state["growth"]
        if not 2 <= len(shape) <= 8 or shape[0] != "batch":
            raise self.wrong(f"{field}.shape", 'of 2 to 8 dimensions, the first "batch"', shape)
        axis, dimension = -1, None
        if growth is not None:
            self.table(growth, f"{field}.growth")
            axis = self.integer(growth, f"{field}.growth.axis", 1, len(shape) - 1)
            dimension = self.text(growth, f"{field}.growth.dimension")
            for name, least in (("rows", 0), ("per", 1), ("lag", 0)):
                self.integer(growth, f"{field}.growth.{name}", least, MOST_ROWS)
            self.boolean(growth, f"{field}.growth.fixed")
            if growths.setdefault(dimension, growth) != growth or dimension == "batch":
                raise self.wrong(f"{field}.growth", f"the rule that other states have for {dimension}", growth)
        for i, size in enumerate(shape[1:], 1):
            if (
                size != dimension
                if i == axis
                else not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MOST_ROWS
            ):
                raise self.wrong(
                    f"{field}.shape[{i}]", f"{dimension!r}" if i == axis else f"an integer in 1..{MOST_ROWS}", size
                )

    def runner_fields(self, manifest: dict[str, Any]) -> None:
        model = self.table(self.get(manifest, "model"), "model")
        self.text(model, "model.dtype", DTYPES)
        self.integer(model, "model.vocab_size", 1, WHOLE)
        self.boolean(model, "model.all_logits")
        capacity = self.table(self.get(manifest, "capacity"), "capacity")
        self.integer(capacity, "capacity.capacity_tokens", 1, MOST_TOKENS)
        self.boolean(capacity, "capacity.bounded")
        self.integer(manifest, "prefill_tokens", 1, 1 << 24)
        growths: dict[str, Any] = {}
        names = set()
        for i, state in enumerate(self.items(manifest, "states")):
            self.state(f"states[{i}]", state, growths)
            names.add(state["name"])
        if len(names) < len(manifest["states"]):
            raise CheckError(f"{self.path}: states has a name twice. Export the package again.")
        for i, token in enumerate(self.items(manifest, "eos_token_ids")):
            self.integer({f"eos_token_ids[{i}]": token}, f"eos_token_ids[{i}]", 0, WHOLE)
        if manifest.get("chat") is not None:
            chat = self.table(manifest["chat"], "chat")
            for name in CHAT:
                self.text(chat, f"chat.{name}")
        if manifest.get("native") is not None:
            native = self.table(manifest["native"], "native")
            for name in ("library", "system", "machine"):
                self.text(native, f"native.{name}")
        if manifest.get("quantization") is not None:
            self.text(self.table(manifest["quantization"], "quantization"), "quantization.scheme", ("int8", "int4"))
        for i, engine in enumerate(self.items(manifest, "engines") if "engines" in manifest else ()):
            field = f"engines[{i}]"
            self.table(engine, field)
            for name in ("file", "tensorrt"):
                self.text(engine, f"{field}.{name}")
            for name in ("size_bytes", "batch", "prefill_tokens"):
                self.integer(engine, f"{field}.{name}", 1, 1 << 62)
            archs = self.items(engine, f"{field}.archs")
            if not archs or not all(isinstance(arch, str) for arch in archs):
                raise self.wrong(f"{field}.archs", "a list of architectures", archs)
        if manifest.get("engines"):
            options = self.table(self.get(manifest, "trt"), "trt")
            self.boolean(options, "trt.version_compatible")
        for name, library in self.table(manifest.get("plugins", {}), "plugins").items():
            self.text({name: library}, name)
        for name, entry in self.table(self.get(manifest, "files"), "files").items():
            field = f'files["{name}"]'
            check_name(name, f"{self.path}: {field}")
            self.table(entry, field)
            self.integer(entry, f"{field}.size_bytes", 0, 1 << 62)
            if not re.fullmatch("[0-9a-f]{64}", self.text(entry, f"{field}.sha256")):
                raise self.wrong(f"{field}.sha256", "64 hexadecimal digits", entry["sha256"])


# Files.


def check_name(name: str, where: str) -> None:
    """Raise CheckError unless `name` is a plain relative path that stays below its folder."""
    parts = name.split("/")
    if not name or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts) or ":" in parts[0]:
        raise CheckError(f"{where} names {name!r}, which is no file inside the package.")


def inside(folder: Path, name: str) -> Path:
    """The path of the package's file `name`.

    Raises:
        CheckError: It leads out of the folder, by its name or by a symbolic link.
    """
    check_name(name, str(folder))
    path = folder
    for part in name.split("/"):
        path = path / part
        if path.is_symlink():
            raise CheckError(
                f"{path} is a symbolic link, which may lead out of the package. Copy the package with its links followed (cp -rL)."
            )
    return path


def listed(folder: Path, manifest: dict[str, Any], name: str) -> Path:
    """The path of the package's file `name`, which the manifest must list with its hash, and which must have its size.

    Raises:
        CheckError: It is not listed, missing, no plain file, or of another size.
    """
    path = inside(folder, name)
    entry = manifest["files"].get(name)
    if entry is None:
        raise CheckError(
            f"{path} is not listed in {MANIFEST}, so nothing says what it must be. Export the package again."
        )
    try:
        found = path.stat()
    except OSError as error:
        raise CheckError(
            f"{path} is missing, though the manifest lists it ({error.strerror}). {_again(folder, manifest, name)}"
        ) from error
    if not stat.S_ISREG(found.st_mode) or found.st_size != entry["size_bytes"]:
        raise _changed(path, "size", _again(folder, manifest, name))
    return path


def sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_hash(folder: Path, manifest: dict[str, Any], name: str) -> Path:
    """`listed`, and the file's SHA-256 is the manifest's."""
    path = listed(folder, manifest, name)
    if sha256(path) != manifest["files"][name]["sha256"]:
        raise _changed(path, "SHA-256", _again(folder, manifest, name))
    return path


def _changed(path: Path, what: str, again: str) -> CheckError:
    return CheckError(f"{path} is not the file that was exported: its {what} differs from the manifest. {again}")


def _again(folder: Path, manifest: dict[str, Any], name: str) -> str:
    """What to do about a file that is lost or damaged; engines are built, the rest is exported."""
    built = any(entry["file"] == name for entry in manifest.get("engines", []))
    return "Copy the package again, or " + (
        f"build it again: still-export build {folder}" if built else "export the model again."
    )


class Hashing:
    """Checks the hashes of large files in a thread, while they are loaded; `finish` waits for it.

    Args:
        folder, manifest: The package.
        names: Of its files, each checked to be listed at once.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], names: Iterable[str]) -> None:
        self._error: Exception | None = None
        self._names = list(names)
        for name in self._names:
            listed(folder, manifest, name)
        self._thread = threading.Thread(target=self._run, args=(folder, manifest), daemon=True)
        self._thread.start()

    def _run(self, folder: Path, manifest: dict[str, Any]) -> None:
        try:
            for name in self._names:
                check_hash(folder, manifest, name)
        except (OSError, RunError) as error:
            self._error = error if isinstance(error, RunError) else CheckError(f"{folder}: {error}")

    def finish(self) -> None:
        """Raise CheckError where a file is not the one that was exported."""
        self._thread.join()
        if self._error is not None:
            raise self._error


# The files that an ONNX graph names: weights outside of it. Numbers of fields are those of onnx.proto.

_GRAPH: dict[int, Any] = {}
_TENSOR: dict[int, Any] = {13: "entry"}
_SPARSE = {1: _TENSOR, 2: _TENSOR}
_ATTRIBUTE = {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE}
_NODE = {5: _ATTRIBUTE}
_GRAPH.update({1: _NODE, 5: _TENSOR, 15: _SPARSE})
_MODEL = {7: _GRAPH, 20: {1: _GRAPH, 2: _GRAPH}, 25: {7: _NODE}}


def external_files(graph: bytes, source: str) -> set[str]:
    """Names of the files that hold weights of a serialized ONNX model.

    Raises:
        CheckError: The bytes are no such model.
    """
    found: set[str] = set()
    pending: list[tuple[Any, int, int]] = [(_MODEL, 0, len(graph))]
    try:
        while pending:
            kind, begin, end = pending.pop()
            if kind == "entry":
                pair = {number: graph[a:b] for number, a, b in _fields(graph, begin, end)}
                if pair.get(1) == b"location":
                    found.add(pair.get(2, b"").decode("utf-8"))
                continue
            for number, a, b in _fields(graph, begin, end):
                # Most of a model names no file: what lacks the word needs no look.
                if number in kind and graph.find(b"location", a, b) >= 0:
                    pending.append((kind[number], a, b))
    except (IndexError, ValueError) as error:
        raise CheckError(f"{source} is no ONNX model ({error}). Copy the package again.") from error
    return found


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, begin and end of the fields of a message that have a length."""
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 2:
            size, at = _varint(data, at)
            if at + size > end:
                raise ValueError("a field ends behind its message")
            yield key >> 3, at, at + size
            at += size
        elif kind == 0:
            _, at = _varint(data, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


# Native code: libraries, plugins and engines run as the user, whatever the package says of them.


def trusted_list() -> Path:
    """The user's own list of native files, by SHA-256: built on this machine, or loaded with --trust-native."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "still-export" / "trusted-native"


def trusts(digest: str) -> bool:
    """Whether the user's list has a file of this SHA-256."""
    try:
        lines = trusted_list().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    return digest in {line.split(" ", 1)[0] for line in lines}


def trust(path: Path) -> None:
    """Add a native file to the user's list: this machine built it, or the user says so."""
    digest = sha256(path)
    if trusts(digest):
        return
    target = trusted_list()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a", encoding="utf-8") as file:
            file.write(f"{digest} {path.name}\n")
    except OSError as error:
        print(f"{target} cannot be written ({error.strerror}): {path.name} stays untrusted", file=sys.stderr)


def trust_package(folder: Path, engines: bool = True) -> None:
    """Add the package's native files to the user's list: kernel of ONNX Runtime, plugin libraries, `engines`; what --trust-native does.

    Raises:
        CheckError: One of them is not the file that was exported.
    """
    manifest = read_manifest(folder)
    names = [manifest["native"]["library"]] if manifest.get("native") else []
    names += [entry["file"] for entry in manifest.get("engines", []) if engines]
    names += [name for name in manifest["files"] if name.startswith(PLUGIN) and (folder / name).exists()]
    for name in names:
        trust(check_hash(folder, manifest, name))


def native_file(folder: Path, manifest: dict[str, Any], name: str) -> Path | None:
    """The path of a native file of the package, unchanged; None where the user's list does not have it.

    Raises:
        CheckError: It is not the file that was exported.
    """
    path = check_hash(folder, manifest, name)
    return path if trusts(manifest["files"][name]["sha256"]) else None


UNTRUSTED = (
    "was not built on this machine, and loading it runs its maker's code. --trust-native allows that, and remembers it"
)
"""Why a native file is not loaded."""
