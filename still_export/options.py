"""Options as fields of dataclasses: flags and their allowed values. Records raise ConfigError for other values, and for contradictions.

pydantic costs 15 MB and a tenth of a second, so it is loaded only where types are checked: `run` checks none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, get_type_hints

from still_export.errors import ConfigError, StillExportError, unknown

if TYPE_CHECKING:
    from pydantic import TypeAdapter


def option(default: Any, text: str, **more: Any) -> Any:
    """A dataclass field that is also a flag of the command line (cli/flags.py).

    Args:
        default: Value without the flag.
        text: The flag's help.
        more: `flag`: its name, if it is not the field's with dashes. `also`: its other names. `shown`: the default in words. `panel`: title
            of its group of flags. `least`, `most`: smallest and largest number. `above`, `below`: exclusive limits. `choices`: allowed
            values, which the help does not list. `commas`: a tuple's values are one text; else the flag is repeated. `env`: environment
            variable for the flag.
    """
    return field(default=default, metadata={"help": text, **more})


def names_of(kind: type) -> tuple[str, ...]:
    """Fields of the dataclass `kind` that are flags."""
    return tuple(entry.name for entry in fields(kind) if "help" in entry.metadata)


def options_of(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `values` that are options of the dataclass `kind`."""
    return {name: values[name] for name in names_of(kind) if name in values}


def flag_of(kind: type, name: str) -> str:
    entry = next(entry for entry in fields(kind) if entry.name == name)
    return str(entry.metadata.get("flag", f"--{name.replace('_', '-')}"))


def check_options(record: Any) -> None:
    """Raise ConfigError if a field of the dataclass `record` is outside its option's limits."""
    for entry in fields(record):
        value, allowed = getattr(record, entry.name), entry.metadata
        if value is None:
            continue
        typed = f"{flag_of(type(record), entry.name)} {value}"
        if "choices" in allowed and value not in allowed["choices"]:
            raise unknown(value, map(str, allowed["choices"]), typed)
        if "least" in allowed and value < allowed["least"]:
            raise ConfigError(f"{typed}: it must be at least {allowed['least']}.")
        if "above" in allowed and value <= allowed["above"]:
            raise ConfigError(f"{typed}: it must be more than {allowed['above']}.")
        if "most" in allowed and value > allowed["most"]:
            raise ConfigError(f"{typed}: it must be at most {allowed['most']}.")
        if "below" in allowed and value >= allowed["below"]:
            raise ConfigError(f"{typed}: it must be less than {allowed['below']}.")


def check_types(kind: type, values: Mapping[str, Any], source: str, fail: type[StillExportError]) -> None:
    """Raise `fail` if a value, parsed JSON, does not have the type of the field of the dataclass `kind`."""
    from pydantic import ValidationError

    from still_export.fields import first_fault

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
    from pydantic import TypeAdapter

    hints = get_type_hints(kind)
    return {entry.name: TypeAdapter(hints[entry.name]) for entry in fields(kind)}
