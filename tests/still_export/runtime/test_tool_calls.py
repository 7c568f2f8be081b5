"""Calls of tools come out of an answer, however it is cut into pieces; what is no whole call stays content."""

from __future__ import annotations

import json
from typing import Any

import pytest

from still_export.runtime.reasoning import Reasoning
from still_export.runtime.sampling import Sampling
from still_export.runtime.tool_calls import BEGINNINGS, ToolCalls
from still_export.serving.replies import Answered, Reply
from still_export.serving.requests import Event
from still_export.serving.wire import Choice, ParsedRequest
from tests.still_export.runtime.notations import MODELS, NOTATIONS

NOW = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": NOW}}]
BERN = [("now", {"city": "Bern", "days": 3})]
GIVEN = '{"city": "Bern", "days": 3}'
S, E = "<|tool_call_start|>", "<|tool_call_end|>"
WRITTEN = {
    "twice": (
        '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b", "arguments": {"x": [1]}}</tool_call>',
        [("a", {}), ("b", {"x": [1]})],
    ),
    "text of digits": (
        "<tool_call><function=now><parameter=city>\n12\n</parameter></function></tool_call>",
        [("now", {"city": "12"})],
    ),
    "an end of a parameter in its text": (
        "<tool_call><function=now><parameter=city>\na </parameter> b\n</parameter></function></tool_call>",
        [("now", {"city": "a </parameter> b"})],
    ),
    "mistral's names": (
        f"[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{GIVEN}[TOOL_CALLS]b[ARGS]{{}}",
        [*BERN, ("b", {})],
    ),
    "llama's two": (
        f'{{"name": "now", "parameters": {GIVEN}}}; {{"name": "b", "parameters": {{}}}}',
        [*BERN, ("b", {})],
    ),
    "python's attributes": (f"{S}[now(city='Bern', days=3), a.b()]{E}", [*BERN, ("a.b", {})]),
    "python, no names of arguments": (f"{S}[now('Bern', days=3)]{E}", BERN),
    "python, a list without its brackets": (f"{S}now(city='Bern',\n days=3,){E}", BERN),
    "python with JSON's words, signs and escapes": (
        f"{S}[f(a=[true, None, -1.5e3], b={{'k': (1, 2)}}, c='\\u00e9\\n\\'', d=\"a\nb\", x-y=null)]{E}",
        [("f", {"a": [True, None, -1500.0], "b": {"k": [1, 2]}, "c": "é\n'", "d": "a\nb", "x-y": None})],
    ),
    "python, joined and raw texts": (f"{S}[f(a='b' \"c\", d=r'\\e')]{E}", [("f", {"a": "bc", "d": "\\e"})]),
    "python's object": ("<tool_call>{'name': 'now', 'arguments': {'city': 'Bern', 'days': 3,},}</tool_call>", BERN),
    "a fence": (f'<tool_call>\n```json\n{{"name": "now", "arguments": {GIVEN}}}\n```\n</tool_call>', BERN),
    "no end after the last call": (f"{S}[now(city='Bern', days=3)]", BERN),
    "arguments as a text of JSON": (
        '<tool_call>{"name": "now", "arguments": "{\\"city\\": \\"Bern\\", \\"days\\": 3}"}</tool_call>',
        BERN,
    ),
}
WRITTEN |= {name: (form.written, BERN) for name, form in NOTATIONS.items()}


def reply(tools: Any = TOOLS, texts: tuple[str, ...] = BEGINNINGS) -> Reply:
    reasoning = Reasoning(("<think>", "</think>"), False)
    choice = Choice([1], 9, Sampling(), 0, reasoning, ToolCalls(tools, texts))
    return Reply(ParsedRequest(True, [choice]), "m")


def whole(made: Reply, text: str, ended: str) -> dict[str, Any]:
    """The choice of an answer in one object."""
    (choice,) = made.whole([Answered(text, ended)])["choices"]
    return dict(choice)


def called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def streamed(text: str, step: int) -> tuple[str, list[tuple[str, Any]], str]:
    """(content, calls, finish reason) of an answer in pieces of `step` characters."""
    made, content = reply(), ""
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    for n, piece in enumerate(pieces, 1):
        (choice,) = made.piece(0, Event(piece, "end" if n == len(pieces) else None))["choices"]
        content += choice["delta"].get("content", "")
        assert n == len(pieces) or "tool_calls" not in choice["delta"]
    assert [call["index"] for call in choice["delta"].get("tool_calls", ())] == list(
        range(len(called(choice["delta"])))
    )
    return content, called(choice["delta"]), choice["finish_reason"]


@pytest.mark.parametrize("before", ["", "Let me look.\n", "<think>hm</think>\n\n"])
@pytest.mark.parametrize("name", WRITTEN)
def test_calls_come_out_whole_and_in_pieces(name: str, before: str) -> None:
    text, calls = WRITTEN[name]
    if before.startswith("Let") and not text.startswith(BEGINNINGS):
        return  # a call without a mark begins an answer, or it is none
    choice = whole(reply(), before + text, "end")
    assert called(choice["message"]) == calls and choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == (before if before.startswith("Let") else None)
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in choice["message"]["tool_calls"])
    for step in (1, 3, 7):
        assert streamed(before + text, step) == (choice["message"]["content"] or "", calls, "tool_calls")


@pytest.mark.parametrize(
    "text, content",
    [
        (f"{S}[now(city='Bern', days=3)]{E}It is noon.", "It is noon."),
        (
            f"First:\n{S}[now(city='Bern', days=3)]{E}\nthen {S}[now(city=open('x'))]{E}",
            f"First:\nthen {S}[now(city=open('x'))]{E}",
        ),
        (f"<tool_call>\n{{broken</tool_call>\n{S}[now(city='Bern', days=3)]{E}", "<tool_call>\n{broken</tool_call>\n"),
        (f"<tool_call>{json.dumps({'name': 'now', 'arguments': BERN[0][1]})}</tool_call>\nSo.", "So."),
    ],
)
def test_text_around_calls_is_content(text: str, content: str) -> None:
    message = whole(reply(), text, "end")["message"]
    assert called(message) == BERN and message["content"] == content
    for step in (1, 4):
        assert streamed(text, step) == (content, BERN, "tool_calls")


BROKEN = [
    "<tool_call>\n{broken",
    '<tool_call>{"name": "now"}</tool_call>',
    "a < b, and <tool",
    "[TOOL_CALLS]now[ARGS]{",
    "[TOOL_CALLS]",
    '{"a": 1}',
    '{"name": "other", "arguments": {}}',
    "{" * 2000,
    "[other(x=1)]",
    "[a link](http://x)",
    '<tool_call>{"name": "now", "arguments": {"x": NaN}}</tool_call>',
    '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
    f'<tool_call>{{"name": "now", "arguments": {"[" * 5000}}}</tool_call>',
    f"{S}[now(x={'[' * 5000})]{E}",
    f"{S}[now(x={{1, 2}})]{E}",
    f"{S}[now(x=b'a', y=1j)]{E}",
    f"{S}[now(open('x'))]{E}",
    f"{S}[now(x=open('x'))]{E}",
    f"{S}[now(city='Be",
    "<tool_call>\n<function=now>\n<parameter=city>\nBe",
    "<tool_call>now\n<arg_key>city</arg_key>\n<arg_value>Be",
    "<tool_call> " * 300,
]


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_whole_call_is_content(text: str) -> None:
    for ended in ("end", "length"):
        choice = whole(reply(texts=tuple(mark for mark in BEGINNINGS if mark != "<|python_tag|>")), text, ended)
        assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == ("length" if ended == "length" else "stop")


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
KIND: dict[str, Any] = {
    "Kind": {"enum": ["1", "2"], "type": "string"},
    "Many": {"type": "array", "items": {"type": "integer"}},
}
KIND["Either"] = {"anyOf": [{"type": "string"}, {"type": "integer"}]}


@pytest.mark.parametrize(
    "schema, text, value",
    [
        ({"type": "string"}, "12345", "12345"),
        ({"type": "string"}, "True", "True"),
        (OPTIONAL, "12346", "12346"),
        (OPTIONAL, "true", "true"),
        (OPTIONAL, "null", None),
        ({"type": ["string", "null"]}, "007.50", "007.50"),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": "3"}, "3", "3"),
        ({"$ref": "#/$defs/Kind"}, "1", "1"),
        ({"allOf": [{"$ref": "#/$defs/Kind"}], "default": "2"}, "1", "1"),
        ({"$ref": "#/$defs/Many"}, "[1, 2]", [1, 2]),
        ({"$ref": "#/$defs/None"}, "x", "x"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "no", "no"),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "array", "items": {"type": "string"}}, "['a', 'b']", ["a", "b"]),
        ({"type": "array"}, "('a', 2)", ["a", 2]),
        ({"type": "object"}, "{'a': [1, None]}", {"a": [1, None]}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "12", 12),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "012", "012"),
        (None, "12", 12),
        (None, "a b", "a b"),
        ({"$ref": "#/$defs/Either/anyOf/0"}, "1", "1"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"$ref": "#/properties/x"}, "12", 12),
    ],
)
def test_values_have_the_schemas_types(schema: Any, text: str, value: Any) -> None:
    parameters = {"type": "object", "properties": {"x": schema} if schema is not None else {}, "$defs": KIND}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for written in (
        f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>",
        f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    ):
        ((_, arguments),) = called(whole(reply(tools), written, "end")["message"])
        assert arguments["x"] == value and type(arguments["x"]) is type(value)


@pytest.mark.parametrize("model", MODELS)
def test_notations_of_published_models(model: str) -> None:
    """Calls are found by the tools' names alone, and of other names by the template or the tokenizer's words."""
    form = NOTATIONS[MODELS[model]]
    assert called(whole(reply(texts=()), form.written, "end")["message"]) == BERN
    other = form.written.replace("now", "later")
    message = whole(reply(texts=(f"{{{{ tools }}}} {form.begins}",)), other, "end")["message"]
    assert called(message) == ([("later", BERN[0][1])] if form.begins else [])
    unasked = whole(reply(tools=None, texts=()), form.written, "end")["message"]
    assert unasked["content"] == form.written and "tool_calls" not in unasked
    assert not called(whole(reply(texts=()), other, "end")["message"])
