"""Values that come from files, checked by type and range with pydantic: what is wrong, in one line that names file and field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field, fields
from functools import cache
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from still_export.errors import ConfigError, StillExportError, unknown


def option(default: Any, text: str, **more: Any) -> Any:
    """A dataclass's field that is a flag of the command line, too (cli/flags.py).

    Args:
        default: Where nobody gives the flag.
        text: The flag's help.
        more: `flag`: its name, where that is not the field's with dashes. `shown`: the default in words. `panel`: title of the flags that
            it stands among. `least`: smallest number. `below`: what it is smaller than. `choices`: all that it may be, of which the flag
            says nothing. `commas`: of a tuple, values stand in one text; otherwise the flag is repeated.
    """
    return field(default=default, metadata={"help": text, **more})


def names_of(kind: type) -> tuple[str, ...]:
    """Fields of the dataclass `kind` that are flags."""
    return tuple(entry.name for entry in fields(kind) if "help" in entry.metadata)


def flag_of(kind: type, name: str) -> str:
    """The flag of the dataclass `kind`'s field `name`."""
    entry = next(entry for entry in fields(kind) if entry.name == name)
    return str(entry.metadata.get("flag", f"--{name.replace('_', '-')}"))


def check_options(record: Any) -> None:
    """Raise ConfigError where a field of the dataclass `record` is not within what its option allows."""
    for entry in fields(record):
        value, allowed = getattr(record, entry.name), entry.metadata
        if value is None:
            continue
        if "choices" in allowed and value not in allowed["choices"]:
            raise unknown(value, allowed["choices"], f"{entry.name}={value!r}")
        if "least" in allowed and value < allowed["least"]:
            raise ConfigError(f"{entry.name}={value}; it must be at least {allowed['least']}.")
        if "below" in allowed and value >= allowed["below"]:
            raise ConfigError(f"{entry.name}={value}; it must be less than {allowed['below']}.")


class Record(BaseModel):
    """Values are taken as they are, never converted; fields that this version does not know are left alone."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


def check_record(kind: type[Record], values: Any, source: Any, fail: type[StillExportError], advice: str = "") -> None:
    """Raise `fail` unless `values`, as JSON has them, are a `kind`; `source` is the file that they come from."""
    try:
        kind.model_validate(values)
    except ValidationError as error:
        raise fail(f"{source}: {first_fault(error)}. {advice}".rstrip()) from error


def check_types(kind: type, values: Mapping[str, Any], source: str, fail: type[StillExportError]) -> None:
    """Raise `fail` where a value, as JSON has it, is not of the type that the dataclass `kind` gives the field of that name."""
    for name, adapter in _adapters(kind).items():
        if name not in values:
            continue
        try:
            adapter.validate_json(json.dumps(values[name], default=str), strict=True)
        except ValidationError as error:
            fault = first_fault(error)
            raise fail(f"{source}: {name}{fault if fault.startswith('[') else f': {fault}'}.") from error


@cache
def _adapters(kind: type) -> dict[str, TypeAdapter[Any]]:
    return {name: TypeAdapter(hint) for name, hint in get_type_hints(kind).items()}


def first_fault(error: ValidationError) -> str:
    """The first thing that is wrong, as "field: what, not value"."""
    fault = error.errors(include_url=False)[0]
    field = ""
    for part in fault["loc"]:
        if isinstance(part, int):
            field += f"[{part}]"
        elif "[" not in part and part not in _BRANCHES:
            field += f".{part}" if field and part.isidentifier() else part if part.isidentifier() else f'["{part}"]'
    said = fault["msg"].removeprefix("Value error, ")
    value = fault.get("input")
    shown = "" if isinstance(value, (dict, list, BaseModel)) or fault["type"] == "missing" else f", not {value!r:.60}"
    return f"{field}: {said}{shown}" if field else f"{said}{shown}"


_BRANCHES = ("int", "str", "float", "bool", "none", "constrained-int", "constrained-float", "constrained-str")
"""What pydantic puts into a place for the branch of a union that it tried."""
