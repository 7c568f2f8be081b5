"""One contract, three readers: pydantic's model, its JSON Schema and the reader of packages; still_run reads its own fields of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from still_export.package import checked
from still_export.package.manifest import Manifest, schema_text
from still_export.package.refusals import CheckError
from tests.still_export.package.manifest_cases import BASE, Case, cases, changed

SCHEMA = json.loads(checked.SCHEMA.read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
WHOLE = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
STRICT = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=WHOLE)(SCHEMA)
"""The same, but that 1.0 is no integer: no writer of ours has it, and few languages read it as one."""
CASES = cases()


def parsed(content: bytes) -> str | None:
    """What the reader of packages says of a manifest; None: it accepts it."""
    try:
        checked.parse_manifest(content, "manifest.json")
    except CheckError as error:
        return str(error)
    return None


def modelled(values: Any) -> bool:
    """Whether pydantic's model accepts it."""
    try:
        Manifest.model_validate(values)
    except ValidationError:
        return False
    return True


def test_the_schema_is_that_of_the_model() -> None:
    """`python -m still_export.package.manifest` writes it."""
    assert checked.SCHEMA.read_text(encoding="utf-8") == schema_text()
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["format_version"]["const"] == checked.FORMAT_VERSION


def test_the_reader_knows_every_keyword_of_the_schema() -> None:
    """A keyword that it would pass over: a model that needs one teaches it to both readers first."""
    told = {"title", "description", "default", "$defs", "$schema"}
    known = {
        "$ref",
        "anyOf",
        "type",
        "const",
        "enum",
        "minimum",
        "maximum",
        "minLength",
        "pattern",
        "items",
        "minItems",
        "maxItems",
    }
    known |= {"properties", "required", "additionalProperties"}  # fmt: skip
    found: set[str] = set()

    def look(rule: Any) -> None:
        if not isinstance(rule, dict):
            return
        found.update(rule)
        for inner in (*rule.get("properties", {}).values(), *rule.get("$defs", {}).values(), *rule.get("anyOf", ())):
            look(inner)
        look(rule.get("items"))
        look(rule.get("additionalProperties"))

    look(SCHEMA)
    assert found - told == known
    integers = [d for d in SCHEMA["$defs"].values() for d in d["properties"].values() if d.get("type") == "integer"]
    assert all({"minimum", "maximum"} <= d.keys() or "enum" in d for d in integers)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_reader_says_the_same(case: Case) -> None:
    said = parsed(case.content)
    assert (said is None) == (case.says is None), said
    if case.says is not None:
        assert said is not None and said.startswith("manifest.json") and case.says in said, said
        assert len(said) < 300, said
    try:
        values = json.loads(case.content.decode("utf-8"))
    except (ValueError, RecursionError):
        return  # no JSON: no model or schema sees it
    assert VALIDATOR.is_valid(values) == case.schema_accepts
    if said is None or "is not readable" not in said:
        assert modelled(values) == (case.says is None)


def test_there_are_cases_of_each_kind() -> None:
    kinds = [(case.says is None, case.schema_accepts) for case in CASES]
    assert min(kinds.count(kind) for kind in ((True, True), (False, True), (False, False))) > 20


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 32))
def test_changed_manifests_are_accepted_by_all_or_none(seed: int) -> None:
    content = changed(seed)
    said, values = parsed(content), json.loads(content)
    assert modelled(values) == (said is None), said
    if said is None:
        assert STRICT.is_valid(values)
    elif not STRICT.is_valid(values):
        assert any(word in said for word in (" must be ", " is missing", " nothing here knows", "format version")), said
    else:
        with pytest.raises(CheckError):  # what fields say of each other
            checked.check_rules(values, "manifest.json")


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    )
)
def test_fields_that_nothing_reads_hold_any_json(value: Any) -> None:
    content = json.dumps(BASE | {"config": {"x": value}}).encode()
    plain: Callable[[str], Any] = lambda name: pytest.fail(name)  # noqa: E731
    try:
        json.loads(content, parse_constant=plain)
        json.dumps(value, ensure_ascii=False).encode()
    except (pytest.fail.Exception, UnicodeEncodeError):
        assert "is not readable" in str(parsed(content))
    else:
        assert parsed(content) is None


def edited(**changes: Any) -> bytes:
    return json.dumps({**BASE, **changes}).encode()


def test_what_another_version_wrote_is_exported_again_by_its_command() -> None:
    command, versions = "still-export '/models/a b' --to onnx -o out", {"still-export": "0.0.9"}
    for changes in ({"model": {}}, {"states": [{"name": "x"}]}, {"format_version": 1}):
        with pytest.raises(CheckError) as fault:
            checked.parse_manifest(edited(command=command, versions=versions, **changes), "manifest.json")
        assert command in str(fault.value)
        assert "0.0.9" in str(fault.value) or "format_version" in changes
    for hidden in ("still-export x\x1b[2J", "still-export x\nrm", "x" * 3000, ""):
        with pytest.raises(CheckError) as fault:
            checked.parse_manifest(edited(command=hidden, model={}), "manifest.json")
        assert not hidden or hidden not in str(fault.value)


def test_an_older_chat_format_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    texts = ("start", "system_start", "system_to_user", "user_to_assistant", "assistant_to_user")
    content = edited(chat=dict.fromkeys(texts, "x"))
    assert checked.parse_manifest(content, "manifest.json")["chat"] is None
    assert "no chats" in caplog.text and BASE["command"] in caplog.text


OLD = Path(__file__).with_name("manifest") / "old"
"""Manifests of packages as commits of their days exported them: FORMAT.json, or FORMAT-DAY.json."""


@pytest.mark.parametrize("path", sorted(OLD.iterdir()), ids=lambda path: path.stem)
def test_what_was_exported_is_read_or_the_command_is_named(path: Path) -> None:
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if manifest["format_version"] == checked.FORMAT_VERSION:
        assert parsed(path.read_bytes()) is None
    else:
        assert manifest["command"] in str(parsed(path.read_bytes()))
