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
    """A syntax of tool calls.

    Args:
        mark: Text that a call begins with.
        calls: Parses the calls in the text from the first mark on; raises one of _ERRORS if there is none.
        named: Texts that identify templates with this form.
        words: Words of the form that may be special tokens.
        bare: An answer that begins with this text is a call without the mark.
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
    """Schemas of a tool's parameters, by name."""
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
            name, _, arguments = part.partition("[ARGS]")
            found.append((name.partition("[CALL_ID]")[0].strip(), json.loads(arguments)))
    return found


def _llama(text: str, tools: Tools) -> list[ToolCall]:
    """JSON objects with `parameters`, separated by semicolons."""
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
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if None in arguments:
            raise ValueError("an argument without a name")
        found.append((ast.unparse(call.func), arguments))
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
    """Returns (text between the marks at the beginning of `text`, text after them)."""
    if not text.startswith(begin) or end not in text:
        raise ValueError(f"no {begin} and {end}")
    inner, _, rest = text.removeprefix(begin).partition(end)
    return inner, rest


def _object(call: Any) -> ToolCall:
    arguments = call["arguments"] if "arguments" in call else call["parameters"]
    if not isinstance(call["name"], str):
        raise ValueError("the name is no text")
    return call["name"], arguments


class ToolCalls:
    """Separates tool calls from an answer's content while it is generated.

    Args:
        form: None: nothing is a call.
        tools: Tools of the request.
    """

    def __init__(self, form: Form | None, tools: Tools = ()) -> None:
        self.form, self.tools = form, tools
        self._pending, self._begun, self._calls = "", False, False

    def push(self, text: str) -> str:
        """Add `text`; returns the content that is certain by now."""
        if self.form is None:
            return text
        self._pending += text
        if self._calls:
            return ""
        mark, bare = self.form.mark, self.form.bare
        if not self._begun and bare and self._pending.lstrip().startswith(bare):
            self._calls = True
            return ""
        before, found, _ = self._pending.partition(mark)
        if found:
            self._calls, self._pending = True, self._pending[len(before) :]
            return before if before.strip() else ""
        part = max((n for n in range(1, len(mark)) if self._pending.endswith(mark[:n])), default=0)
        sure = self._pending[: len(self._pending) - part]
        if not self._begun and not sure.strip():
            return ""  # blanks may precede a call
        self._begun, self._pending = True, self._pending[len(sure) :]
        return sure

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """Returns (rest of the content, calls as OpenAI's objects). An incomplete call is content, unchanged."""
        pending, self._pending = self._pending, ""
        if not self._calls or self.form is None:
            return pending, []
        try:
            return "", [
                _openai_call(name, arguments) for name, arguments in self.form.calls(pending.strip(), self.tools)
            ]
        except _ERRORS:
            return pending, []


def _openai_call(name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # Mistral's templates accept only call ids of nine letters and digits.
    return {"id": secrets.token_hex(5)[:9], "type": "function", "function": {"name": name, "arguments": text}}


def form_of(templates: Mapping[str, str]) -> Form | None:
    """The form that chat templates ask for; None: no known one."""
    texts = [templates[name] for name in ("tool_use", "default") if name in templates]
    return next((form for form in FORMS if any(part in text for part in form.named for text in texts[:1])), None)
