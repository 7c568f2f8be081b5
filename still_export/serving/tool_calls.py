"""Tool calls in an answer, in the formats of published chat templates."""

from __future__ import annotations

import ast
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ToolCall = tuple[str, Any]
"""Name and arguments."""
Tools = Sequence[Mapping[str, Any]]
_ERRORS = (ValueError, TypeError, KeyError, AttributeError, SyntaxError, RecursionError, MemoryError)
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Form:
    """A format of tool calls.

    Args:
        mark: What a call begins with.
        calls: Those of what stands from the first mark on; raises one of _ERRORS where it is none.
        named: Parts of a template that asks for this form.
        words: Of it, which may be special tokens.
        bare: An answer that begins so is a call without the mark.
    """

    mark: str
    calls: Callable[[str, Tools], list[ToolCall]]
    named: tuple[str, ...]
    words: tuple[str, ...]
    bare: str = ""


def _tagged(text: str, tools: Tools) -> list[ToolCall]:
    """Qwen, Hermes and Nemotron: `<tool_call>` around a JSON object, or around `<function=NAME>` with `<parameter=NAME>`."""
    found, rest = [], text
    while rest.strip():
        inner, rest = _between(rest.lstrip(), "<tool_call>", "</tool_call>")
        inner = inner.strip()
        if inner.startswith("<function="):
            name, _, body = inner.removeprefix("<function=").partition(">")
            found.append((name.strip(), dict(_parameters(body, _schema(tools, name.strip())))))
        else:
            found.append(_object(json.loads(inner)))
    return found


def _parameters(body: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    rest = body.partition("</function>")[0].strip()
    while rest:
        inner, rest = _between(rest, "<parameter=", "</parameter>")
        name, _, value = inner.partition(">")
        value = value.removeprefix("\n").removesuffix("\n")
        rest = rest.lstrip()
        if (schema.get(name) or {}).get("type") == "string":
            yield name, value
            continue
        try:
            yield name, json.loads(value)
        except ValueError:
            yield name, value


def _schema(tools: Tools, name: str) -> Mapping[str, Any]:
    """JSON schemas of a tool's parameters, by name."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            found = (function.get("parameters") or {}).get("properties")
            return found if isinstance(found, Mapping) else {}
    return {}


def _mistral(text: str, tools: Tools) -> list[ToolCall]:
    """`[TOOL_CALLS]` before a list of JSON objects, or before each `NAME[ARGS]{...}`."""
    found: list[ToolCall] = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        if part.lstrip().startswith("["):
            found += [_object(call) for call in json.loads(part)]
        else:
            name, _, given = part.partition("[ARGS]")
            found.append((name.partition("[CALL_ID]")[0].strip(), json.loads(given)))
    return found


def _llama(text: str, tools: Tools) -> list[ToolCall]:
    """Llama: JSON objects with `parameters`, separated by semicolons."""
    found, rest = [], text.removeprefix("<|python_tag|>").strip()
    while rest:
        value, end = _DECODER.raw_decode(rest)
        found.append(_object(value))
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return found


def _python(text: str, tools: Tools) -> list[ToolCall]:
    """LFM2: `<|tool_call_start|>` around a list of Python calls with constants."""
    inner, _ = _between(text, "<|tool_call_start|>", "<|tool_call_end|>")
    listed = ast.parse(inner.strip(), mode="eval").body
    if not isinstance(listed, ast.List):
        raise ValueError("no list")
    found = []
    for call in listed.elts:
        if not isinstance(call, ast.Call) or not isinstance(call.func, (ast.Name, ast.Attribute)) or call.args:
            raise ValueError("no call with named arguments")
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if None in given:
            raise ValueError("an argument without a name")
        found.append((ast.unparse(call.func), given))
    return found


FORMS = (
    Form("<tool_call>", _tagged, ("<tool_call>",), ("<tool_call>", "</tool_call>")),
    Form("[TOOL_CALLS]", _mistral, ("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    Form("<|tool_call_start|>", _python, ("<|tool_call_start|>",), ("<|tool_call_start|>", "<|tool_call_end|>")),
    Form(
        "<|python_tag|>", _llama, ("<|python_tag|>", '{"name": function name, "parameters":'), ("<|python_tag|>",), "{"
    ),
)


def _between(text: str, begin: str, end: str) -> tuple[str, str]:
    """The text between two marks at the beginning of `text`, and the text after them."""
    if not text.startswith(begin) or end not in text:
        raise ValueError(f"no {begin} and {end}")
    inner, _, rest = text.removeprefix(begin).partition(end)
    return inner, rest


def _object(call: Any) -> ToolCall:
    given = call["arguments"] if "arguments" in call else call["parameters"]
    if not isinstance(call["name"], str):
        raise ValueError("the name is no text")
    return call["name"], given


class ToolCalls:
    """Separates tool calls from an answer's content while it is generated.

    Args:
        form: None: nothing is a call.
        tools: Those of the request.
    """

    def __init__(self, form: Form | None, tools: Tools = ()) -> None:
        self.form, self.tools = form, tools
        self._held, self._begun, self._calls = "", False, False

    def push(self, text: str) -> str:
        """Content that is certain after `text`."""
        if self.form is None:
            return text
        self._held += text
        if self._calls:
            return ""
        mark, bare = self.form.mark, self.form.bare
        if not self._begun and bare and self._held.lstrip().startswith(bare):
            self._calls = True
            return ""
        before, found, _ = self._held.partition(mark)
        if found:
            self._calls, self._held = True, self._held[len(before) :]
            return before if before.strip() else ""
        part = max((n for n in range(1, len(mark)) if self._held.endswith(mark[:n])), default=0)
        sure = self._held[: len(self._held) - part]
        if not self._begun and not sure.strip():
            return ""  # white space, which may precede a call
        self._begun, self._held = True, self._held[len(sure) :]
        return sure

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the content, and the calls as OpenAI's objects; an incomplete call is content."""
        held, self._held = self._held, ""
        if not self._calls or self.form is None:
            return held, []
        try:
            return "", [_said(name, given) for name, given in self.form.calls(held.strip(), self.tools)]
        except _ERRORS:
            return held, []


def _said(name: str, given: Any) -> dict[str, Any]:
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, allow_nan=False)
    # Mistral's templates only accept call ids of nine letters and digits.
    return {"id": secrets.token_hex(5)[:9], "type": "function", "function": {"name": name, "arguments": arguments}}


def form_of(templates: Mapping[str, str]) -> Form | None:
    """The format that chat templates use; None: none that is known."""
    texts = [templates[name] for name in ("tool_use", "default") if name in templates]
    return next((form for form in FORMS if any(part in text for part in form.named for text in texts[:1])), None)
