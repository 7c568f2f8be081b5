"""Read and check manifest.json: by manifest.schema.json, and by rules that no schema can express.

Standard library only: exports copy this file and the schema into packages, for run_ort.py and run_trt.py. The cases of
tests/still_export/package/manifest hold all readers to one another; still_run checks the fields that it reads.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from pathlib import Path
from typing import Any

from still_export.package.files import MANIFEST, check_name, inside
from still_export.package.refusals import CheckError
from still_graphs.states import AHEAD

FORMAT_VERSION = 2
"""Of manifest.json."""
SCHEMA = Path(__file__).with_name("manifest.schema.json")
"""JSON Schema (2020-12), which still_export/package/manifest.py writes; this file checks the keywords that it has."""
MOST_COMMAND = 2000
"""Characters of a command that a message shows."""
MOST_DEPTH = 64
"""Deepest nesting of lists and objects; some readers would overflow their stack."""
_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the package in `folder`, with every field checked.

    Raises:
        CheckError: There is none, it is damaged, of another format version, or a field is not what it must be.
    """
    path = inside(folder, MANIFEST)
    if not path.is_file():
        raise CheckError(
            f"{folder} has no {MANIFEST}: it is no exported package. Export one: still-export MODEL -o DIR"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckError(f"{path} is not readable ({error}). Copy the package again.") from error
    return parse_manifest(content, str(path))


def parse_manifest(content: bytes, source: str) -> dict[str, Any]:
    """The same of a file's `content`; `source` names the file."""
    _check(content, source)
    return _upgraded(json.loads(content))


@functools.lru_cache(maxsize=8)  # a manifest is read several times when a package opens, and a check takes 30 ms
def _check(content: bytes, source: str) -> None:
    """Raise CheckError for what is no manifest."""
    try:
        manifest = json.loads(content.decode("utf-8"))
        _check_plain(manifest, 0)
    except (ValueError, RecursionError) as error:
        raise CheckError(f"{source} is not readable ({error}). Copy the package again.") from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if type(version) is int and version != FORMAT_VERSION:
        raise CheckError(_other_format(source, manifest))
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    upgraded = _upgraded(manifest) if isinstance(manifest, dict) else manifest
    try:
        _Schema(schema["$defs"], source).check(schema, upgraded, "")
        check_rules(upgraded, source)
    except CheckError as error:
        if not isinstance(manifest, dict) or type(version) is not int:
            raise
        raise CheckError(f"{error} {_by_another_version(manifest)}") from None
    if upgraded != manifest:
        logging.getLogger(__name__).warning(
            "%s: an older version wrote its chat format, so there are no chats. %s", source, again(manifest)
        )


def check_rules(manifest: dict[str, Any], source: str) -> None:
    """Check fields of a valid manifest against each other; raises CheckError where they disagree."""
    model, files, names = manifest["model"], manifest["files"], set()
    if len(model["layer_types"]) != model["layers"]:
        raise _refusal(
            source, "model.layer_types", f"has {len(model['layer_types'])} entries for {model['layers']} layers"
        )
    growths: dict[str, Any] = {}
    for i, state in enumerate(manifest["states"]):
        field, growth, shape = f"states[{i}]", state["growth"], state["shape"]
        if state["name"] in names:
            raise _refusal(source, f"{field}.name", f"is that of another state, {state['name']!r:.40}")
        names.add(state["name"])
        if (state["layer"] >= model["layers"]) != state["name"].startswith(AHEAD):
            raise _refusal(source, f"{field}.layer", f"is {state['layer']}; the model has {model['layers']} layers")
        if state["op"] and state["op"] not in manifest["ops"]:
            raise _refusal(source, f"{field}.op", f"is {state['op']!r:.40}, which ops does not have")
        if growth and growth["axis"] >= len(shape):
            raise _refusal(source, f"{field}.growth.axis", f"is {growth['axis']}, which the shape does not have")
        for axis, size in enumerate(shape):
            name = "batch" if axis == 0 else growth["dimension"] if growth and axis == growth["axis"] else None
            if (size if isinstance(size, str) else None) != name:
                raise _refusal(source, f"{field}.shape[{axis}]", f"must be {name or 'a number'}")
        if growth and (growth["dimension"] == "batch" or growths.setdefault(growth["dimension"], growth) != growth):
            raise _refusal(source, f"{field}.growth", "must be the rule of the other states of its dimension")
    for name in files:
        check_name(name, f"{source}: files")
    named = [(f"engines[{i}].file", engine["file"]) for i, engine in enumerate(manifest.get("engines", []))]
    named += [(f'plugins["{major}"]', name) for major, name in manifest.get("plugins", {}).items()]
    named += [("native.library", manifest["native"]["library"])] if manifest.get("native") else []
    for field, name in named:
        if name not in files:
            raise _refusal(source, field, f"is {name!r:.60}, which files does not list")
    if (manifest.get("engines") or manifest.get("plugins")) and manifest.get("trt") is None:
        raise _refusal(source, "trt", "is missing")
    for i, place in enumerate((manifest.get("quantization") or {}).get("adapters", [])):
        if len(place["outputs"]) != len(place["weights"]):
            raise _refusal(source, f"quantization.adapters[{i}].outputs", "has not one entry for each of the weights")


def _refusal(source: str, field: str, what: str) -> CheckError:
    where = f"{source}: {field}" if field else source
    return CheckError(f"{where} {what}. Copy the package again, or export it by this version.")


def _upgraded(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest of an older version as this one writes it: texts around messages are no chat templates."""
    chat = manifest.get("chat")
    old = isinstance(chat, dict) and "templates" not in chat and "user_to_assistant" in chat
    return {**manifest, "chat": None} if old else dict(manifest)


def _by_another_version(manifest: dict[str, Any]) -> str:
    """What to do if the package is not damaged but of another version, whose name the manifest has."""
    versions = manifest.get("versions")
    wrote = versions.get("still-export") if isinstance(versions, dict) else None
    named = f" {wrote}" if isinstance(wrote, str) and re.fullmatch(r"[\w.+-]{1,40}", wrote) else ""
    return f"Written by still-export{named}. {again(manifest)}"


def again(manifest: dict[str, Any]) -> str:
    """The advice to export again, with the command in the manifest if it is one line of plain text."""
    command = manifest.get("command")
    plain = isinstance(command, str) and command.isprintable() and 0 < len(command) <= MOST_COMMAND
    return f"Export the model again: {command}" if plain else "Export the model again."


def _other_format(source: str, manifest: dict[str, Any]) -> str:
    """The error text for another format version, with the command that exports the model again."""
    version = manifest["format_version"]
    fault = f"{source} has format version {version}; this still-export reads {FORMAT_VERSION}."
    if version > FORMAT_VERSION:
        return f"{fault} Update still-export."
    return f"{fault} {again(manifest)}"


def _check_plain(value: Any, depth: int) -> None:
    """Raise ValueError for JSON that Python accepts and other readers refuse."""
    if depth >= MOST_DEPTH and isinstance(value, (dict, list)):
        raise ValueError("nested too deeply")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number of JSON")
    if isinstance(value, str):
        value.encode("utf-8")  # not half of a character
    for item in (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_plain(item, depth + 1)


class _Schema:
    """Checks a value against the JSON Schema keywords that pydantic writes for manifest.py."""

    def __init__(self, definitions: dict[str, Any], source: str) -> None:
        self.definitions, self.source = definitions, source

    def check(self, rule: dict[str, Any], value: Any, field: str) -> None:
        """Raise CheckError unless `value` at `field` satisfies `rule`."""
        branches = self._branches(rule)
        own = next((b for b in branches if type(value) is _TYPES.get(b.get("type", ""), type(value))), None)
        if own is None or not self._fits(own, value):
            shown = json.dumps(value) if not isinstance(value, (dict, list)) else f"one of {len(value)} entries"
            wanted = " or ".join(map(_required, branches if own is None else [own]))
            raise _refusal(self.source, field, f"must be {wanted}, not {shown:.60}")
        if isinstance(value, list):
            for i, item in enumerate(value):
                self.check(own.get("items", {}), item, f"{field}[{i}]")
        if isinstance(value, dict):
            self._members(own, value, field)

    def _members(self, rule: dict[str, Any], value: dict[str, Any], field: str) -> None:
        known, others = rule.get("properties", {}), rule.get("additionalProperties", True)
        for name in rule.get("required", ()):
            if name not in value:
                raise _refusal(self.source, _join(field, name), "is missing")
        for name, item in value.items():
            if name not in known and others is False:
                raise _refusal(self.source, field, f"has {name!r:.40}, which nothing here knows")
            inner = known.get(name, others)
            if inner is not True:
                self.check(inner, item, _join(field, name) if name in known else f'{field}["{name}"]')

    def _branches(self, rule: dict[str, Any]) -> list[dict[str, Any]]:
        if "$ref" in rule:
            return self._branches(self.definitions[rule["$ref"].rpartition("/")[2]])
        return [b for branch in rule["anyOf"] for b in self._branches(branch)] if "anyOf" in rule else [rule]

    @staticmethod
    def _fits(rule: dict[str, Any], value: Any) -> bool:
        """Whether `value`, which has the rule's type, satisfies the rest of `rule`."""
        if isinstance(value, int | float) and not rule.get("minimum", value) <= value <= rule.get("maximum", value):
            return False
        if isinstance(value, str) and (
            len(value) < rule.get("minLength", 0) or not re.fullmatch(rule.get("pattern", "(?s).*"), value)
        ):
            return False
        if isinstance(value, list) and not rule.get("minItems", 0) <= len(value) <= rule.get("maxItems", len(value)):
            return False
        return value == rule.get("const", value) and value in rule.get("enum", [value])


def _join(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name


def _required(rule: dict[str, Any]) -> str:
    """What `rule` requires, in words."""
    kind = rule["type"]
    if "const" in rule or "enum" in rule:
        return " or ".join(map(str, rule.get("enum") or [rule["const"]]))
    if kind == "number" and "minimum" in rule:
        return f"a number from {rule['minimum']} on"
    if kind == "integer":
        return f"an integer in {rule['minimum']}..{rule['maximum']}"
    if kind == "array":
        most = f" to {rule['maxItems']}" if "maxItems" in rule else " or more"
        return f"a list of {rule['minItems']}{most} items" if "minItems" in rule else "a list"
    if kind == "string":
        return (
            f"a text of {rule['pattern']}"
            if "pattern" in rule
            else "a text" + " of a character or more" * ("minLength" in rule)
        )
    return {"object": "an object", "boolean": "true or false", "null": "null"}[kind]
