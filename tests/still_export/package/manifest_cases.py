"""Manifests that every reader accepts or refuses alike: a base, and named edits of it (manifest/).

An edit sets or removes what stands `at` a path (`also`: elsewhere too), or replaces a text in the file, by bytes of Latin-1 (null: all of
it). `says`: it is refused in these words. `schema`: a JSON Schema cannot say so, and accepts it.
"""

import copy
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("manifest")
BASE_FILE = FOLDER / "base.json"
BASE: dict[str, Any] = json.loads(BASE_FILE.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Case:
    """One manifest: what a file of it holds, and what readers say of it."""

    name: str
    content: bytes
    says: str | None
    schema_accepts: bool


def _set(values: Any, path: list[Any], value: Any) -> Any:
    """`values` with `value` at `path`."""
    if not path:
        return value
    table = values
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    return values


def _content(edit: dict[str, Any]) -> bytes:
    if "replace" in edit:
        old, new = edit["replace"]
        content, new = BASE_FILE.read_bytes(), new.encode("latin-1")
        assert old is None or content.count(old.encode()) == 1, edit["name"]
        return new if old is None else content.replace(old.encode(), new)
    values: Any = copy.deepcopy(BASE)
    if "set" in edit:
        values = _set(values, edit["at"], edit["set"])
    for path, value in edit.get("also", ()):
        values = _set(values, path, value)
    if edit.get("remove"):
        table = values
        for key in edit["at"][:-1]:
            table = table[key]
        del table[edit["at"][-1]]
    return json.dumps(values).encode()


def cases() -> list[Case]:
    edits = json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))
    return [Case(e["name"], _content(e), e.get("says"), "says" not in e or "schema" in e) for e in edits]


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 7, 8, 1 << 24, (1 << 24) + 1, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, 1 << 64, 1 << 80, -(1 << 63)),
    *(0.5, 1.0, 1e300, "", "batch", "slots", "float32", "int64", "int8", "trt", "onnx", "0" * 64, "../x", "é", [], {}, [1], {"a": 1}),
    *("engine.plan", "HybridAttention", "salient_key.0", ["batch", 4], ["batch", 4, "slots", 64]),
)  # fmt: skip
"""What a changed manifest may have anywhere."""


def changed(seed: int) -> bytes:
    """The base with a few values exchanged, dropped, doubled or put elsewhere; by `seed` alone."""
    chance, values = random.Random(seed), copy.deepcopy(BASE)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = list(_places(values))
        if not places:
            break
        table, key = chance.choice(places)
        kind = chance.randrange(5)
        if kind == 0:
            del table[key]
        elif kind == 1:
            table[key] = copy.deepcopy(chance.choice(places)[0])  # where it would hold itself, a copy of what is there
        elif kind == 2 and isinstance(table, list):
            table.insert(key, copy.deepcopy(table[key]))
        elif kind == 2:
            table[str(chance.choice(VALUES))[:8]] = copy.deepcopy(table[key])
        else:
            table[key] = copy.deepcopy(chance.choice(VALUES))
    return json.dumps(values).encode()


def _places(values: Any) -> Any:
    """Every list or object in `values` with each of its keys."""
    if isinstance(values, (dict, list)):
        for key in values if isinstance(values, dict) else range(len(values)):
            yield values, key
            yield from _places(values[key])
