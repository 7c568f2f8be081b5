"""Check values from files by type and range with pydantic; an error is one line with file and field."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from still_export.errors import StillExportError


class Record(BaseModel):
    """Values are never converted; unknown fields stay."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


def check_record(kind: type[Record], values: Any, source: Any, fail: type[StillExportError], advice: str = "") -> None:
    """Raise `fail` unless `values`, parsed JSON, are a `kind`; `source` is the file."""
    try:
        kind.model_validate(values)
    except ValidationError as error:
        raise fail(f"{source}: {first_fault(error)}. {advice}".rstrip()) from error


def first_fault(error: ValidationError) -> str:
    """The first fault, as "field: what, not value"."""
    fault = error.errors(include_url=False)[0]
    field = ""
    for part in fault["loc"]:
        if isinstance(part, int):
            field += f"[{part}]"
        elif "[" not in part and part not in _BRANCHES:
            field += f".{part}" if field and part.isidentifier() else part if part.isidentifier() else f'["{part}"]'
    message = fault["msg"].removeprefix("Value error, ")
    value = fault.get("input")
    shown = "" if isinstance(value, (dict, list, BaseModel)) or fault["type"] == "missing" else f", not {value!r:.60}"
    return f"{field}: {message}{shown}" if field else f"{message}{shown}"


_BRANCHES = ("int", "str", "float", "bool", "none", "constrained-int", "constrained-float", "constrained-str")
"""Location parts that pydantic adds for the branch of a union."""
