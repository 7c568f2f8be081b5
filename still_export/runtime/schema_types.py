"""Values of a JSON Schema's types from plain text, for notations of tool calls whose arguments have no quotes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from still_export.runtime.literals import Literals, json_value

_NAMES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_DEPTH = 20


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value that `text` stands for.

    Texts that fit none of the schema's types stay texts: what to do with them is the caller's to decide.

    Args:
        schema: JSON Schema of the value; None: unknown.
        root: The schema that `$ref` refers to.
    """
    types, choices = _allowed(schema, root, 0)
    value, plain = _parsed(text.strip())
    if choices is not None:
        same = [choice for choice in choices if choice == text or (plain and _same(choice, value))]
        if same:
            return same[0]
    if types is None:
        try:
            return json_value(text.strip(), 0)[0] if plain and _is_json(text) else text
        except (ValueError, RecursionError):
            return text
    if not plain:
        return text
    kind = _NAMES[type(value)]
    if kind == "number" and value.is_integer() and "integer" in types and "number" not in types:
        value, kind = int(value), "integer"
    if kind == "integer" and "integer" not in types and "number" in types:
        kind = "number"
    if kind == "string" or kind not in types:
        return text
    # A number that JSON writes otherwise (007, 7.50) is rather a text, where both are allowed.
    return value if "string" not in types or kind not in ("integer", "number") or json.dumps(value) == text else text


def _parsed(text: str) -> tuple[Any, bool]:
    """(value of a literal, True), or (None, False)."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true", True
    try:
        reader = Literals(text)
        value = reader.value()
        reader.blank()
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError, OverflowError):
        return None, False
    return value, reader.at == len(text)


def _is_json(text: str) -> bool:
    try:
        return json_value(text.strip(), 0)[1] == len(text.strip())
    except (ValueError, RecursionError):
        return False


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _allowed(schema: Any, root: Mapping[str, Any], depth: int) -> tuple[set[str] | None, list[Any] | None]:
    """(types that a schema allows, its enumerated values); None: any."""
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return None, None
    if isinstance(schema.get("$ref"), str):
        schema = _referred(schema["$ref"], root)
        return _allowed(schema, root, depth + 1)
    choices = (
        schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
    )
    types: set[str] | None = None
    kind = schema.get("type")
    if isinstance(kind, str):
        types = {kind}
    elif isinstance(kind, list):
        types = {name for name in kind if isinstance(name, str)}
    elif choices is not None:
        types = {_NAMES[type(choice)] for choice in choices}
    if types is not None and schema.get("nullable") is True:  # OpenAPI's
        types.add("null")
    for key in ("anyOf", "oneOf", "allOf"):
        branches = [
            _allowed(branch, root, depth + 1) for branch in schema.get(key) or () if isinstance(branch, Mapping)
        ]
        known = [found for found, _ in branches if found is not None]
        if types is None and branches and (key == "allOf" or len(known) == len(branches)) and known:
            types = set.intersection(*known) if key == "allOf" else set.union(*known)
        if choices is None and (listed := [found for _, found in branches if found is not None]):
            choices = [choice for found in listed for choice in found]
    return types, choices


def _referred(name: str, root: Mapping[str, Any]) -> Any:
    """The schema of a reference within `root`; None if there is none."""
    found: Any = root
    for part in name.removeprefix("#").strip("/").split("/"):
        if isinstance(found, list) and part.isdecimal():
            found = found[int(part)] if int(part) < len(found) else None
        elif isinstance(found, Mapping) and part:
            found = found.get(part.replace("~1", "/").replace("~0", "~"))
    return found
