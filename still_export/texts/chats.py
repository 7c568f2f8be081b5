"""Conversations in the forms that training tools write, and their text by a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from still_export.errors import DataError
from still_export.package.chat_format import ChatFormat

FORMS = (
    'A line is a JSON list of messages {"role": ..., "content": ...} or {"from": ..., "value": ...} (ShareGPT); or an object with such '
    'a list as "messages" or "conversations"; or {"prompt": ..., "completion": ...}.'
)
LISTS = ("messages", "conversations")
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Other names of roles."""
PAIRS = (("role", "content"), ("from", "value"))
SPOKEN = ("system", "user", "assistant")
THOUGHT = "</think>"
"""The end of reasoning inside a message, which templates leave out of earlier answers."""


@dataclass(frozen=True)
class Conversation:
    """messages: With "role" and "content". tools: JSON schemas of functions, if the line has some."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


def conversation(row: Any) -> Conversation:
    """The conversation of a parsed line.

    Raises:
        DataError: The line has none of the FORMS, or a message without words.
    """
    tools = None
    if isinstance(row, Mapping):
        tools = row.get("tools") if isinstance(row.get("tools"), list) else None
        row = _messages(row)
    if not isinstance(row, Sequence) or isinstance(row, str):
        raise DataError(f"a {type(row).__name__} is no conversation.")
    messages = [_message(each, number) for number, each in enumerate(row, 1)]
    if not messages:
        raise DataError("the conversation is empty.")
    return Conversation(messages, tools or None)


def _messages(row: Mapping[str, Any]) -> Any:
    found = [name for name in LISTS if isinstance(row.get(name), Sequence)]
    if found:
        system = row.get("system")
        return [*([{"role": "system", "content": system}] if system else []), *row[found[0]]]
    if {"prompt", "completion"} <= row.keys():
        asked, answer = row["prompt"], row["completion"]
        asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        answer = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        if isinstance(asked, list) and isinstance(answer, list):
            return [*asked, *answer]
    raise DataError(f"an object with {', '.join(map(repr, row)) or 'nothing'} is no conversation.")


def _message(message: Any, number: int) -> dict[str, Any]:
    if isinstance(message, Mapping):
        for role, content in PAIRS:
            if isinstance(message.get(role), str):
                name = message[role].lower()
                rest = {n: v for n, v in message.items() if n not in (role, content)}
                read = {**rest, "role": ROLES.get(name, name), "content": message.get(content)}
                if not _text(read["content"]) and not read.get("tool_calls"):
                    raise DataError(f"message {number} ({read['role']}) has no text.")
                return read
    raise DataError(f"message {number} has no role.")


def _text(content: Any) -> str:
    """The text of a message's content, a text or text parts; "": none."""
    if isinstance(content, str):
        return content.strip()
    parts = content if isinstance(content, Sequence) else ()
    return "\n".join(str(p["text"]) for p in parts if isinstance(p, Mapping) and isinstance(p.get("text"), str)).strip()


def printed(chat: ChatFormat, talk: Conversation) -> str:
    """The text of a conversation.

    Raises:
        DataError: The template leaves words out. Training on such a text would teach its marks alone.
        RunError: The template refuses the messages.
    """
    text = chat.render(talk.messages, tools=talk.tools, reply=False)
    place = 0
    for number, message in enumerate(talk.messages, 1):
        if message["role"] not in SPOKEN:  # results of tools may be printed in another form
            continue
        for part in _text(message.get("content")).rpartition(THOUGHT)[2].splitlines():
            at = text.find(part.strip(), place)
            if at < 0:
                raise DataError(
                    f"the chat template does not print message {number} ({message['role']}): {part.strip()[:40]!r} is missing."
                )
            place = at + len(part.strip())
    return text
