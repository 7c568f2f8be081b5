"""The part of the manifest that runners use, every field of it checked.

Standard library only: exports copy this file into packages, for run_ort.py and run_trt.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from still_export.package.files import MANIFEST, check_name, inside
from still_export.package.refusals import CheckError

FORMAT_VERSION = 2
"""Of manifest.json."""
DTYPES = ("float32", "float16", "bfloat16")
MOST_ROWS = 1 << 24
MOST_TOKENS = 1 << 40
WHOLE = (1 << 31) - 1
CHAT = ("start", "system_start", "system_to_user", "user_to_assistant", "assistant_to_user")


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
        self.text(state, f"{field}.dtype", (*DTYPES, "int32", "int64"))
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
            archs = self.items(native, "native.archs") if "archs" in native else []
            if not all(isinstance(arch, str) for arch in archs):
                raise self.wrong("native.archs", "a list of architectures", archs)
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
