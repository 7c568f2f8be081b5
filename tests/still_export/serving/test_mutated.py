"""Right requests with some value replaced, repeated or left out: answered or refused with a reason, never a fault of the server."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from still_export.package.chat_format import ChatFormat
from still_export.runtime.grammar import LarkGrammar, answer_lark
from still_export.runtime.sampling import RunError
from still_export.serving.app import Settings
from tests.still_export.serving.served import Served, serve

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    "required": ["city"],
    "$defs": {"A": {"enum": ["x", "y"]}},
}
FUNCTION: dict[str, Any] = {"name": "weather", "parameters": SCHEMA, "strict": True}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
HI = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
SETTINGS = {"max_tokens": 2, "stop": ["a"], "logit_bias": {"5": 1}, "n": 1, "stream_options": {"include_usage": True}}
RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"messages": HI, **SETTINGS, "logprobs": True, "top_logprobs": 2, "documents": [{"text": "a"}]}),
    ("chat/completions", {"messages": [*HI, {"role": "assistant", "tool_calls": [CALL]}], "tools": TOOLS, "max_tokens": 2}),
    ("chat/completions", {"messages": HI, "tools": TOOLS, "tool_choice": "required", "max_tokens": 2}),
    ("chat/completions", {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ("completions", {"prompt": ["a", "b"], **SETTINGS, "logprobs": 2, "min_p": 0.1, "response_format": {"type": "json_object"}}),
    ("chat/completions", {"messages": HI, "tools": TOOLS, "max_tokens": 2, "tool_choice": {
        "type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}}}),
    ("responses", {"input": HI, "tools": [{"type": "function", **FUNCTION}], "tool_choice": {
        "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}}),
    ("responses", {"input": [*HI, {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}],
                   "tools": [{"type": "function", **FUNCTION}], "text": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ("prefixes", {"messages": HI}),
    ("prefixes", {"prompt": ["a", "b"]}),
]  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, -1, 2.5, 1e308, 10**30, "", "a", "\ud800", "\0", [], {}, [[]], [None], [1], ["a"], {"a": 1}, {"allOf": 5},
    {"enum": 5}, {"enum": []}, {"properties": 5}, {"required": 5}, {"$ref": "#"}, {"$ref": "#/no"}, {"$ref": 5}, {"pattern": "("},
    {"minimum": "a"}, {"minimum": 10, "maximum": 1}, {"not": {}}, {"type": ["string", "null"]}, {"type": "text"}, "x" * 999, ["x"] * 17,
]  # fmt: skip
NAMES = ["type", "properties", "enum", "allOf", "anyOf", "items", "$ref", "strict", "content", "suffix", "stream"]


@pytest.fixture(scope="module")
def cached(byte_package: Path) -> Iterator[Served]:
    from still_export.runtime.prefix_folder import open_prefixes

    with serve(byte_package, Settings("tiny"), lambda model: open_prefixes(model, "1MiB"), rows=2, waiting=9) as served:
        yield served


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values within a value of JSON."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


def mutated(body: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    body = copy.deepcopy(body)
    for _ in range(draw.choice((1, 1, 2))):
        if not (found := list(places(body))):
            break
        *path, last = draw.choice(found)
        inner: Any = body
        for key in path:
            inner = inner[key]
        odd, how = copy.deepcopy(draw.choice(ODD)), draw.random()
        if how < 0.6:
            inner[last] = odd
        elif how < 0.7:
            del inner[last]
        elif how < 0.9 and isinstance(inner, dict):
            inner[draw.choice(NAMES)] = odd
        else:
            inner[last] = [inner[last], inner[last]]
    return body


@pytest.mark.parametrize("place", range(len(RIGHT)), ids=[path for path, _ in RIGHT])
def test_mutated_requests_are_answered_or_refused(cached: Served, place: int) -> None:
    path, right = RIGHT[place]
    status, said = cached.ask("POST", f"/v1/{path}", {"model": "tiny", **right})
    assert status == 200, said
    draw = random.Random(place)
    for _ in range(150):
        body = {"model": "tiny", **mutated(right, draw)}
        status, said = cached.ask("POST", f"/v1/{path}", body)
        text = said if isinstance(said, str) else json.dumps(said)
        assert status in (200, 400, 404, 429) and "server_error" not in text, (path, body, said)


@pytest.mark.parametrize("choice, schema", [
    ("required", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    (None, {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
])  # fmt: skip
def test_a_schema_that_requires_itself_is_the_requests_fault(cached: Served, choice: str | None, schema: Any) -> None:
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    tools = {"tools": [{"type": "function", "function": {"name": "a", "parameters": schema}}], "tool_choice": choice}
    body = {"model": "tiny", "messages": HI, **(tools if choice else form)}
    for stream in (False, True):
        status, said = cached.ask("POST", "/v1/chat/completions", {**body, "stream": stream})
        assert "invalid_request_error" in str(said) and "server_error" not in str(said), said
        assert stream or status == 400


@pytest.mark.parametrize(
    "template", ["<tool_call><function=a><parameter=b>", "<tool_call>", "<|tool_call_start|>", "-"]
)
def test_mutated_schemas_of_calls_in_every_notation(cached: Served, template: str) -> None:
    scheduler, draw, refused = cached.worker.scheduler, random.Random(0), 0
    text = copy.copy(scheduler.text)
    text.chat = ChatFormat({"default": template}, {})
    for _ in range(200):
        parameters = mutated({"parameters": SCHEMA}, draw).get("parameters")
        tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
        try:
            lark = answer_lark(text, [1], None, tools, "required")
            LarkGrammar(text, scheduler.model.manifest["model"]["vocab_size"], lark)
        except RunError:
            refused += 1
    assert 20 < refused < 180
