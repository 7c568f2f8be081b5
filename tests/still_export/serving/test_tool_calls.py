"""Calls of tools come out of an answer, however it is cut into pieces; what is no whole call stays content."""

from __future__ import annotations

import json
from typing import Any

import pytest

from still_export.runtime.reasoning import Reasoning
from still_export.runtime.sampling import Sampling
from still_export.serving.tool_calls import FORMS, ToolCalls, form_of
from still_export.serving.wire import ParsedRequest, Reply

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "now",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
BERN = [("now", {"city": "Bern", "days": 3})]
GIVEN = '{"city": "Bern", "days": 3}'
WRITTEN = {
    "tagged": ("<tool_call>", f'<tool_call>\n{{"name": "now", "arguments": {GIVEN}}}\n</tool_call>', BERN),
    "twice": (
        "<tool_call>",
        '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b", "arguments": {"x": [1]}}</tool_call>',
        [("a", {}), ("b", {"x": [1]})],
    ),
    "parameters": (
        "<tool_call>",
        "<tool_call>\n<function=now>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
        "</tool_call>",
        BERN,
    ),
    "text of digits": (
        "<tool_call>",
        "<tool_call><function=now><parameter=city>\n12\n</parameter></function></tool_call>",
        [("now", {"city": "12"})],
    ),
    "mistral's list": (
        "[TOOL_CALLS]",
        f'[TOOL_CALLS] [{{"name": "now", "arguments": {GIVEN}, "id": "abcdefghi"}}]',
        BERN,
    ),
    "mistral's names": (
        "[TOOL_CALLS]",
        f"[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{GIVEN}[TOOL_CALLS]b[ARGS]{{}}",
        [*BERN, ("b", {})],
    ),
    "llama": (
        "<|python_tag|>",
        f'{{"name": "now", "parameters": {GIVEN}}}; {{"name": "b", "parameters": {{}}}}',
        [*BERN, ("b", {})],
    ),
    "llama's tag": ("<|python_tag|>", f'<|python_tag|>{{"name": "now", "parameters": {GIVEN}}}', BERN),
    "python": (
        "<|tool_call_start|>",
        "<|tool_call_start|>[now(city='Bern', days=3), a.b()]<|tool_call_end|>",
        [*BERN, ("a.b", {})],
    ),
}


def reply(mark: str) -> Reply:
    form = form_of({"default": f"{{{{ tools }}}}{mark}"})
    assert form is not None and form.mark == mark
    reasoning = Reasoning(("<think>", "</think>"), False)
    return Reply(
        ParsedRequest(True, [1], 9, Sampling(), (), False, True, False, {}, reasoning, ToolCalls(form, TOOLS)), "m"
    )


def called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize("before", ["", "Let me look.\n", "<think>hm</think>\n\n"])
@pytest.mark.parametrize("name", WRITTEN)
def test_calls_come_out_whole_and_in_pieces(name: str, before: str) -> None:
    mark, text, calls = WRITTEN[name]
    if name == "llama" and before.startswith("Let"):
        return  # it begins an answer, or it is none
    choice = reply(mark).whole(before + text, "end", 9)["choices"][0]
    assert called(choice["message"]) == calls and choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == (before if before.startswith("Let") else None)
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in choice["message"]["tool_calls"])
    for step in (1, 3, 7):
        said, content, made = before + text, "", reply(mark)
        pieces = [said[i : i + step] for i in range(0, len(said), step)]
        chunks = [
            made.piece(piece, "end" if n == len(pieces) else None)["choices"][0] for n, piece in enumerate(pieces, 1)
        ]
        content = "".join(chunk["delta"].get("content", "") for chunk in chunks)
        assert called(chunks[-1]["delta"]) == calls and content == (choice["message"]["content"] or "")
        assert [call["index"] for call in chunks[-1]["delta"]["tool_calls"]] == list(range(len(calls)))
        assert chunks[-1]["finish_reason"] == "tool_calls" and not any("tool_calls" in c["delta"] for c in chunks[:-1])


@pytest.mark.parametrize(
    "mark, text",
    [
        ("<tool_call>", "<tool_call>\n{broken"),
        ("<tool_call>", '<tool_call>{"name": "now"}</tool_call>'),
        ("<tool_call>", "a < b, and <tool"),
        ("[TOOL_CALLS]", "[TOOL_CALLS]now[ARGS]{"),
        ("<|python_tag|>", '{"a": 1}'),
        ("<|python_tag|>", "{" * 2000),
        ("<tool_call>", '<tool_call>{"name": "now", "arguments": {"x": NaN}}</tool_call>'),
        ("<tool_call>", f'<tool_call>{{"name": "now", "arguments": {"[" * 5000}}}</tool_call>'),
        ("<|tool_call_start|>", "<|tool_call_start|>[now(x={1, 2})]<|tool_call_end|>"),
        ("<|tool_call_start|>", "<|tool_call_start|>[now(x=b'a', y=1j)]<|tool_call_end|>"),
        ("<|tool_call_start|>", "<|tool_call_start|>[now(open('x'))]<|tool_call_end|>"),
        ("<|tool_call_start|>", "<|tool_call_start|>[now(x=open('x'))]<|tool_call_end|>"),
    ],
)
def test_what_is_no_whole_call_is_content(mark: str, text: str) -> None:
    for ended in ("end", "length"):
        choice = reply(mark).whole(text, ended, 9)["choices"][0]
        assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == ("length" if ended == "length" else "stop")


def test_forms_are_told_by_the_template_that_is_used() -> None:
    assert form_of({"default": "x"}) is None
    assert form_of({"default": "[TOOL_CALLS]", "tool_use": "<tool_call>"}) is FORMS[0]
    nothing = ToolCalls(None)
    assert nothing.push("<tool_call>") == "<tool_call>" and nothing.end() == ("", [])
