"""OpenAI's Responses API over chats: requests become those of /v1/chat/completions, and their answers become items and events.

Nothing is stored: each request has the whole conversation.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from still_export.serving.replies import Answered, Reply
from still_export.serving.requests import Event
from still_export.serving.wire import ApiError, ParsedRequest

PASSED = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "user",
    "metadata",
    "store",
    "parallel_tool_calls",
    "prompt_cache_key",
    "seed",
    "stop",
)
"""Fields that chats have, too."""
IGNORED = frozenset(
    (
        "include",
        "truncation",
        "service_tier",
        "safety_identifier",
        "prompt_cache_retention",
        "stream_options",
        "max_tool_calls",
    )
)
"""Fields that change no token."""


def as_chat(body: object) -> object:
    """The request to /v1/chat/completions that asks for the same.

    Raises:
        ApiError: A field is not served.
    """
    if not isinstance(body, dict):
        return body
    chat: dict[str, Any] = {name: body[name] for name in PASSED if name in body}
    known = {
        *PASSED,
        *IGNORED,
        "input",
        "instructions",
        "tools",
        "tool_choice",
        "max_output_tokens",
        "reasoning",
        "text",
        "top_logprobs",
    }
    for name, value in body.items():
        if name not in known and value:
            more = (
                ": responses are not stored; send the whole conversation as input"
                if name == "previous_response_id"
                else ""
            )
            raise ApiError(
                400, f"{name[:64]} is not served here{more}. Leave it out.", name[:64], "unsupported_parameter"
            )
    messages = [] if body.get("instructions") is None else [{"role": "system", "content": body["instructions"]}]
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for number, item in enumerate(given, 1):
            _add(messages, item, number)
    else:
        raise ApiError(400, "input: give a text or a list of items.", "input", "invalid_value")
    chat["messages"] = messages
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if (effort := _inner(body, "reasoning").get("effort")) is not None:
        chat["reasoning_effort"] = effort
    form = _inner(body, "text").get("format") or {"type": "text"}
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {"schema": form.get("schema"), "name": form.get("name")}}
    chat["response_format"] = form
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise ApiError(400, "tools: give a list of functions.", "tools", "invalid_value")
    chat["tools"] = [_tool(tool) for tool in tools]
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = _named(choice)
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("tools")
        if isinstance(allowed, list):
            allowed = [_named(tool) if isinstance(tool, dict) else tool for tool in allowed]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": allowed}}
    chat["tool_choice"] = choice
    return {name: value for name, value in chat.items() if value is not None}


def _inner(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = body.get(name) or {}
    if not isinstance(found, dict):
        raise ApiError(400, f"{name}: give an object.", name, "invalid_value")
    return found


def _named(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.get("name")}}


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise ApiError(
            400, f"tools: {kind!r:.60} is not served here; give functions.", "tools", "unsupported_parameter"
        )
    fields = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in fields if tool.get(name) is not None}}


def _add(messages: list[dict[str, Any]], item: Any, number: int) -> None:
    """Add an item of the input to the messages of a chat."""
    kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
    if kind == "message" and isinstance(item, dict):
        content = item.get("content")
        if isinstance(content, list):
            content = [_part(part) for part in content]
        messages.append({"role": item.get("role"), "content": content})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        if isinstance(output, list):
            output = [_part(part) for part in output]
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind != "reasoning":  # templates write the last turn's alone, which clients do not send
        raise ApiError(400, f"item {number} of input is of type {kind!r:.60}, which is not served here.", "input")


def _part(part: Any) -> Any:
    """A part of a chat's content."""
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    return part


class ResponseReply:
    """The objects and events that answer one request.

    Args:
        body: The request as it came.
    """

    def __init__(self, request: ParsedRequest, model: str, body: Mapping[str, Any]) -> None:
        self._chat = Reply(request, model)
        self._items: list[dict[str, Any]] = []
        self._text, self._number = "", 0
        self._begun: dict[str, Any] | None = None
        self._finished = "completed"
        echoed = (
            "instructions",
            "tools",
            "tool_choice",
            "temperature",
            "top_p",
            "max_output_tokens",
            "metadata",
            "text",
            "reasoning",
        )
        defaults = {"tools": [], "tool_choice": "auto", "metadata": {}, "text": {"format": {"type": "text"}}}
        self._head = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "store": False,
            **{name: defaults.get(name) if body.get(name) is None else body[name] for name in echoed},
        }

    def whole(self, answers: Sequence[Answered]) -> dict[str, Any]:
        """The answer in one object."""
        for _ in self.piece(0, Event(answers[0].text, answers[0].ended)):  # type: ignore[arg-type]
            pass
        return self._response(self._finished, answers)

    def first(self) -> Iterator[dict[str, Any]]:
        """Events before any text."""
        yield self._event("created", response=self._response("in_progress"))
        yield self._event("in_progress", response=self._response("in_progress"))

    def piece(self, index: int, event: Event) -> Iterator[dict[str, Any]]:
        """Events of a piece of the answer."""
        delta = self._chat.piece(index, event)["choices"][0]["delta"]
        if content := delta.get("content"):
            yield from self._open()
            self._text += content
            yield self._event("output_text.delta", **self._place(), delta=content, logprobs=[])
        if not event.ended:
            return
        if self._begun is None and not delta.get("tool_calls"):
            yield from self._open()
        yield from self._close()
        for call in delta.get("tool_calls", ()):
            yield from self._called(call["function"])
        self._finished = "incomplete" if event.ended == "length" else "completed"

    def last(self, answers: Sequence[Answered]) -> Iterator[dict[str, Any]]:
        """Events after all text."""
        yield self._event(self._finished, response=self._response(self._finished, answers))

    def _open(self) -> Iterator[dict[str, Any]]:
        """Begin the message."""
        if self._begun is not None:
            return
        self._begun = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "content": []}
        place = {"output_index": len(self._items)}
        yield self._event("output_item.added", **place, item={**self._begun, "status": "in_progress"})
        yield self._event("content_part.added", **self._place(), part=_output_text(""))

    def _close(self) -> Iterator[dict[str, Any]]:
        """End the message."""
        if self._begun is None:
            return
        item = {**self._begun, "status": "completed", "content": [_output_text(self._text)]}
        yield self._event("output_text.done", **self._place(), text=self._text, logprobs=[])
        yield self._event("content_part.done", **self._place(), part=_output_text(self._text))
        yield self._event("output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)

    def _called(self, function: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        item = {
            "id": f"fc_{secrets.token_hex(12)}",
            "type": "function_call",
            "call_id": f"call_{secrets.token_hex(5)[:9]}",
        }
        item |= {"name": function["name"], "arguments": "", "status": "in_progress"}
        place = {"output_index": len(self._items), "item_id": item["id"]}
        yield self._event("output_item.added", output_index=len(self._items), item=dict(item))
        yield self._event("function_call_arguments.delta", **place, delta=function["arguments"])
        yield self._event(
            "function_call_arguments.done", **place, name=function["name"], arguments=function["arguments"]
        )
        item |= {"arguments": function["arguments"], "status": "completed"}
        yield self._event("output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)

    def _place(self) -> dict[str, Any]:
        assert self._begun is not None
        return {"item_id": self._begun["id"], "output_index": len(self._items), "content_index": 0}

    def _response(self, status: str, answers: Sequence[Answered] | None = None) -> dict[str, Any]:
        usage = None
        if answers is not None:
            found = self._chat.usage(answers)
            usage = {
                "input_tokens": found["prompt_tokens"],
                "input_tokens_details": found["prompt_tokens_details"],
                "output_tokens": found["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": found["total_tokens"],
            }
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if status == "incomplete" else {}
        return {**self._head, **details, "status": status, "output": list(self._items), "usage": usage}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        return event


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
