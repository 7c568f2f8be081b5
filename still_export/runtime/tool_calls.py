"""Tool calls in an answer, in the notations of published models: one tolerant reader for all of them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from still_export.runtime.literals import Literals, loose_value
from still_export.runtime.schema_types import typed
from still_export.runtime.text import Text

ToolCall = tuple[str, dict[str, Any]]
"""Name and arguments."""
Tools = Sequence[Mapping[str, Any]]

BEGINNINGS = (
    "<tool_call>",
    "<tool_calls>",
    "<|tool_call_start|>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_calls_begin|>",
    "<|tool_call|>",
    "<|tool_call>",
    "<|tool_calls|>",
    "<TOOLCALL>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<|python_start|>",
    "<minimax:tool_call>",
    "<seed:tool_call>",
    "<longcat_tool_call>",
    "<function_calls>",
    "<start_function_call>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜DSML｜function_calls>",
    "<|START_ACTION|>",
    "<|action_start|>",
    "<|tools_prefix|>",
    "<|function_call|>",
    "functools[",
    "<function=",
    "<invoke name=",
)
"""Texts that begin calls."""
_KEPT = ("functools[", "<function=", "<invoke name=")
"""Those that are part of the first call."""
_ENDS = (
    "</tool_call>",
    "</tool_calls>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<|tool_calls_end|>",
    "<|/tool_call|>",
    "<|/tool_calls|>",
    "<tool_call|>",
    "</TOOLCALL>",
    "<|python_end|>",
    "</minimax:tool_call>",
    "</seed:tool_call>",
    "</longcat_tool_call>",
    "</function_calls>",
    "<end_function_call>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁end｜>",
    "</｜DSML｜function_calls>",
    "<|END_ACTION|>",
    "<|action_end|>",
    "<|tools_suffix|>",
    "<|eom_id|>",
)
_BETWEEN = ("functools", "<|plugin|>", "function<｜tool▁sep｜>", ";", ",")
"""Texts without a meaning before a call."""


def _any(texts: Iterable[str]) -> str:
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))


_BEGIN = re.compile(_any(BEGINNINGS))
_SKIP = re.compile(rf"(?:\s|{_any([*set(BEGINNINGS) - set(_KEPT), *_ENDS, *_BETWEEN])})*")
_CLOSE = re.compile(rf"(?:\s*(?:{_any(_ENDS)}))*\s*")
_FENCE = re.compile(r"```\w*\s*(?=[{\[])")
_NAME = re.compile(r"[^\W\d][\w.\-/:]*")
_TO_JSON = re.compile(
    r"(?:\s|\[CALL_ID\]\w*|\[ARGS\]|<｜tool▁sep｜>|<\|tool_call_argument_begin\|>|<\|tool_sep\|>|```json)*(?={)"
)
_FUNCTION = re.compile(r"<function=\s*[\"']?([^>\"']+?)[\"']?\s*>|<(?:｜DSML｜)?invoke name=[\"']?([^>\"']+)[\"']?>")
_PARAMETER = re.compile(
    r"\s*<(?:｜DSML｜)?parameter(?:=([^>]+)| name=\"([^\"]+)\"[^>]*)>(.*?)</(?:｜DSML｜)?parameter>"
    r"(?=\s*(?:<(?:｜DSML｜)?parameter[= ]|</function>|</(?:｜DSML｜)?invoke>))",
    re.DOTALL,
)
_FUNCTION_END = re.compile(r"\s*</(?:function|(?:｜DSML｜)?invoke)>")
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_BARE = re.compile(r"\{|\[\s*(?:$|\{|[^\W\d][\w.\-]*(?:$|\())")
_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError)


class ToolCalls:
    """Separates tool calls from an answer's content while it is generated.

    A call is one of the `tools`, or begins with a mark that the model's template or tokenizer has. Broken calls are content, unchanged.
    Objects in calls are JSON or Python's.

    Args:
        tools: Of the request, as OpenAI's API has them; None: nothing is a call.
        texts: The model's template, and the words of its tokenizer that may begin calls.
        one: Only the first call is returned.
    """

    def __init__(self, tools: Tools | None, texts: Iterable[str] = (), one: bool = False) -> None:
        self.tools, self.one = tools, one
        self._functions = dict(_functions(tools or ()))
        known = "\n".join(texts)
        self._marks = frozenset(mark for mark in BEGINNINGS if mark in known)
        self._pending, self._begun, self._calls = "", False, False

    @classmethod
    def of(cls, text: Text, tools: Tools | None, one: bool = False) -> ToolCalls:
        """For answers of a model with this tokenizer and template."""
        templates = text.chat.templates.values() if text.chat else ()
        words = (token.content for token in text.tokenizer.get_added_tokens_decoder().values())
        return cls(tools, [*templates, *words], one)

    def push(self, text: str) -> str:
        """Add `text`; returns the content that is certain by now."""
        if self.tools is None:
            return text
        self._pending += text
        if self._calls:
            return ""
        if not self._begun:
            start = self._pending.lstrip()
            if not start or _BARE.match(start):
                return ""  # white space may precede a call
        if found := _BEGIN.search(self._pending):
            self._calls = True
            before, self._pending = self._pending[: found.start()], self._pending[found.start() :]
            return before if before.strip() else ""
        part = next((n for n in range(_LONGEST, 0, -1) if self._pending[-n:] in _PARTS and n <= len(self._pending)), 0)
        sure = self._pending[: len(self._pending) - part]
        if not self._begun and not sure.strip():
            return ""
        self._begun, self._pending = True, self._pending[len(sure) :]
        return sure

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """Returns (rest of the content, calls as OpenAI's objects)."""
        text, self._pending = self._pending, ""
        calls, content, at = list[ToolCall](), list[str](), 0
        if self.tools is None or not text.strip():
            return text, []
        if not self._begun and _BARE.match(text.lstrip()):
            calls, at = self._block(text, len(text) - len(text.lstrip()), "<|python_tag|>" in self._marks)
        while found := _BEGIN.search(text, at):
            made, end = self._block(text, found.start(), found[0] in self._marks)
            if made:
                content.append(text[at : found.start()])
            else:
                end = max(end, found.end())
                content.append(text[at:end])
            calls += made
            at = end
        content.append(text[at:])
        if not calls:
            return text, []
        return "".join(part for part in content if part.strip()), [
            _openai_call(*call) for call in (calls[:1] if self.one else calls)
        ]

    def _block(self, text: str, at: int, any_name: bool) -> tuple[list[ToolCall], int]:
        """(calls in the block that begins here, its end); no calls if the block has none that is whole."""
        calls, start, end = list[ToolCall](), at, at
        while (place := _SKIP.match(text, start)) is not None:
            try:
                made, after = self._body(text, place.end())
                names_known = all(name in self._functions for name, _ in made)
                json.dumps([arguments for _, arguments in made], allow_nan=False)
            except _ERRORS:
                break
            if not made or not (any_name or names_known):
                break
            close = _CLOSE.match(text, after)
            calls, start = calls + made, close.end() if close else after
            end = start
        return calls, end

    def _body(self, text: str, at: int) -> tuple[list[ToolCall], int]:
        """(calls that are written here, the place after them); raises one of _ERRORS."""
        if fence := _FENCE.match(text, at):
            calls, end = self._body(text, fence.end())
            return calls, end + len(text[end:]) - len(text[end:].lstrip().removeprefix("```"))
        if text.startswith("{", at):
            value, end = loose_value(text, at)
            return [self._object(value)], end
        if text.startswith("[", at):
            try:
                values, end = loose_value(text, at)
                return [self._object(value) for value in values], end
            except ValueError:
                return self._python_list(text, at)
        if found := _FUNCTION.match(text, at):
            return self._tagged(text, found)
        if text.startswith("call:", at):
            at += len("call:")
        name = _NAME.match(text, at)
        if name is None:
            raise ValueError("no call")
        at = name.end()
        if text.startswith("(", at):
            reader = Literals(text, name.start())
            return [self._python(reader)], reader.at
        if text.startswith("{", at):
            reader = Literals(text, at)
            return [(self._named(name[0]), reader.mapping())], reader.at
        if found := _TO_JSON.match(text, at):
            value, end = loose_value(text, found.end())
            if "```json" in found[0]:
                end += len(text[end:]) - len(text[end:].lstrip().removeprefix("```"))
            if not isinstance(value, dict):
                raise ValueError("the arguments are no object")
            return [(self._named(name[0]), value)], end
        return self._pairs(text, self._named(name[0]), at)

    def _object(self, call: Mapping[str, Any]) -> ToolCall:
        """A call that is an object."""
        inner = call.get("function")
        call = inner if isinstance(inner, Mapping) else call
        name = next((call[key] for key in ("name", "tool_name", "function") if key in call), None)
        key = next((key for key in ("arguments", "parameters") if key in call), None)
        if name is None and len(call) == 1 and next(iter(call)) in self._functions:
            ((name, arguments),) = call.items()
        elif key is None:
            raise ValueError("no arguments")
        else:
            arguments = call[key]
        if isinstance(arguments, str):
            arguments = loose_value(arguments.strip() or "{}", 0)[0]
        arguments = {} if arguments is None else arguments
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError("the name is no text, or the arguments are no object")
        return self._named(name), arguments

    def _tagged(self, text: str, found: re.Match[str]) -> tuple[list[ToolCall], int]:
        """`<function=NAME>` or `<invoke name="NAME">` around parameters, or around a JSON object."""
        name, at = self._named((found[1] or found[2]).strip()), found.end()
        arguments: dict[str, Any] = {}
        if text[at:].lstrip().startswith("{"):
            arguments, at = loose_value(text, at + len(text[at:]) - len(text[at:].lstrip()))
        while parameter := _PARAMETER.match(text, at):
            key, at = (parameter[1] or parameter[2]).strip().strip("\"'"), parameter.end()
            value = parameter[3].removeprefix("\n").removesuffix("\n")
            arguments[key] = self._typed(name, key, value)
        end = _FUNCTION_END.match(text, at)
        if end is None:
            raise ValueError("no end of the function")
        return [(name, arguments)], end.end()

    def _pairs(self, text: str, name: str, at: int) -> tuple[list[ToolCall], int]:
        """`NAME`, then `<arg_key>` and `<arg_value>` for each argument, up to `</tool_call>`."""
        arguments: dict[str, Any] = {}
        while pair := _PAIR.match(text, at):
            key, at = pair[1].strip(), pair.end()
            arguments[key] = self._typed(name, key, pair[2])
        if not text[at:].lstrip().startswith("</tool_call>"):
            raise ValueError("no end of the call")
        return [(name, arguments)], at

    def _python_list(self, text: str, at: int) -> tuple[list[ToolCall], int]:
        """`[name(key=value), ...]`."""
        reader = Literals(text, at)
        calls = reader.items("[", "]", lambda: self._python(reader))
        if not calls:
            raise ValueError("no calls")
        return calls, reader.at

    def _python(self, reader: Literals) -> ToolCall:
        """`name(key=value, ...)`; arguments without a name have those of the tool's parameters, in order."""
        name = self._named(reader.word(_NAME))
        parameters = list(_properties(self._functions.get(name, {})))
        arguments: dict[str, Any] = {}

        def argument() -> None:
            key = reader.key("=")
            if key is None:
                if len(arguments) >= len(parameters):
                    raise ValueError("an argument without a name")
                key = parameters[len(arguments)]
            if key in arguments:
                raise ValueError("an argument twice")
            arguments[key] = reader.value()

        reader.items("(", ")", argument)
        return name, arguments

    def _typed(self, name: str, key: str, value: str) -> Any:
        schema = self._functions.get(name, {})
        return typed(value, _properties(schema).get(key), schema)

    def _named(self, name: str) -> str:
        """The tool's name, without the namespace and number that some notations add."""
        if name in self._functions:
            return name
        plain = re.sub(r":\d+$", "", name.removeprefix("functions."))
        return plain if plain != name else name


def _functions(tools: Tools) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Names and schemas of the tools' parameters."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            schema = function.get("parameters")
            yield function["name"], schema if isinstance(schema, Mapping) else {}


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _openai_call(name: str, arguments: Any) -> dict[str, Any]:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # Mistral's templates accept only call ids of nine letters and digits.
    return {"id": secrets.token_hex(5)[:9], "type": "function", "function": {"name": name, "arguments": text}}


_PARTS = frozenset(mark[:n] for mark in BEGINNINGS for n in range(1, len(mark)))
_LONGEST = max(map(len, BEGINNINGS)) - 1
