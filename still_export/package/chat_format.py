"""A model's chat template: renders messages, completely, or cut where a message goes on.

Exports copy this file into packages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from still_export.package.refusals import RunError
from still_export.package.template import TemplateRefusal, render_template

Message = Mapping[str, Any]
MARK = "\ue000\ue001"
"""Private-use characters that mark where a rendered text is cut."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Other programs' names of a message's reasoning. Templates read the first; gpt-oss's read the second."""
THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
)
"""Marks around reasoning that models write."""
OWN = frozenset(("messages", "tools", "add_generation_prompt"))
"""Template variables that are not user arguments."""


@dataclass(frozen=True)
class ChatFormat:
    """The templates of a model by name ("default", and "tool_use" for requests with tools), and the special tokens that they may write.

    Methods raise RunError where messages are malformed, TemplateRefusal where the template does not take them.
    """

    templates: Mapping[str, str]
    tokens: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can hold."""
        return asdict(self)

    @cached_property
    def thoughts(self) -> tuple[str, str] | None:
        """The marks around the model's reasoning, if the template has them."""
        return next((pair for pair in THOUGHTS if any(pair[1] in text for text in self.templates.values())), None)

    @cached_property
    def _forms(self) -> tuple[bool, bool]:
        """Whether the template accepts content as a text, and as a list of parts."""
        found = []
        for content in (MARK, [{"type": "text", "text": MARK}]):
            try:
                text = self._rendered([{"role": "user", "content": content}], None, {}, True)
            except TemplateRefusal:
                text = ""
            found.append(MARK in text and '"type"' not in text and "'type'" not in text)
        return found[0], found[1]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        reply: bool = True,
    ) -> str:
        """The text of a chat.

        Args:
            messages: "role" and "content" (a text or text parts), with "tool_calls" and "reasoning_content" where there are some.
            tools: JSON schemas of functions, as OpenAI's API has them.
            arguments: Of the template, such as `enable_thinking`.
            reply: End with what begins the assistant's answer.
        """
        if not messages:
            raise RunError("there are no messages. Give at least one.")
        if named := sorted(OWN & set(arguments or {})):
            raise RunError(f"{', '.join(named)} is no argument of a chat template: it is given apart.")
        prepared = [self._message(message, number) for number, message in enumerate(messages, 1)]
        return self._rendered(prepared, tools, arguments or {}, reply)

    def render_open(self, messages: Sequence[Message], **options: Any) -> str:
        """The text of a chat up to the end of its last message's content, to be continued. Options: see `render`."""
        continued = [dict(message) for message in messages]
        if continued:
            # If the template strips text, white space after the mark is lost, and so is that before it.
            continued[-1]["content"] = _joined(continued[-1].get("content"), MARK + " ", -1)
        text = self.render(continued, **options, reply=False)
        before, _, after = self._cut(text, last=True)
        return before if after.startswith(" ") else before.rstrip()

    def render_behind(self, messages: Sequence[Message], place: str, *, goes_on: bool = False, **options: Any) -> str:
        """The end of a chat's text, after a text that was read before.

        Args:
            messages: The later ones.
            place: Where the earlier text ended: inside a "user" message, which the first message continues, or after an "answer".
            goes_on: The last message is to be continued; see `render_open`.
            options: See `render`.
        """
        later = [dict(message) for message in messages]
        if place == "answer":
            later[:0] = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}]
        elif later and later[0].get("role") == "user":
            later[0]["content"] = _joined(later[0].get("content"), MARK, 0)
        else:
            raise RunError("a message of the user was begun before; the first one here must go on with it.")
        render = self.render_open if goes_on else self.render
        return self._cut(render(later, **options))[2]

    def opening(self, system: str | None = None, **options: Any) -> str:
        """The text before a user's first message."""
        chat = [{"role": "user", "content": MARK}]
        if system is not None:
            chat.insert(0, {"role": "system", "content": system})
        return self._cut(self.render(chat, **options))[0]

    def start(self) -> str:
        """The part of an answer that the prompt contains already: the first mark of its reasoning and what follows it; "": nothing."""
        if self.thoughts is None:
            return ""
        before, behind = self.thoughts
        text = self.render([{"role": "user", "content": "Hello."}])
        _, mark, rest = text.rpartition(before)
        return mark + rest if mark and behind not in rest else ""

    def _cut(self, text: str, last: bool = False) -> tuple[str, str, str]:
        found = text.rpartition(MARK) if last else text.partition(MARK)
        if not found[1]:
            raise TemplateRefusal("the model's chat template leaves out the message that is to go on. Give it whole.")
        return found

    def _message(self, message: Message, number: int) -> dict[str, Any]:
        if not isinstance(message.get("role"), str):
            raise RunError(f"message {number} has no role. Give one, such as user.")
        prepared = dict(message)
        if message.get("content") is None and message["role"] != "assistant":
            raise RunError(f"message {number} ({message['role']}) has no content. Give a text.")
        prepared["content"] = self._content(message.get("content"), number)
        if isinstance(calls := message.get("tool_calls"), Sequence) and calls:
            prepared["tool_calls"] = [_call(call) for call in calls]
        thought = next((prepared[name] for name in REASONING if prepared.get(name) is not None), None)
        return prepared if thought is None else {REASONING[1]: thought, **prepared, REASONING[0]: thought}

    def _content(self, content: Any, number: int) -> Any:
        """`content` in a form that the template accepts."""
        if content is None:
            return ""
        if isinstance(content, str):
            return content if self._forms != (False, True) else [{"type": "text", "text": content}]
        if not isinstance(content, Sequence):
            raise RunError(
                f"content of message {number} is a {type(content).__name__}; give a text or a list of parts."
            )
        for place, part in enumerate(content, 1):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise RunError(
                    f"part {place} of message {number} is of type {kind!r:.40}; this package reads text alone."
                )
        return list(content) if self._forms[1] else "\n".join(part["text"] for part in content)

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
        reply: bool,
    ) -> str:
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise RunError(f"this model has chat templates for {', '.join(sorted(self.templates))} alone.")
        own = {"messages": messages, "tools": list(tools) if tools else None, "add_generation_prompt": reply}
        return render_template(self.templates[name], {**self.tokens, "documents": None, **arguments, **own})


def _joined(content: Any, mark: str, place: int) -> Any:
    """`content` with `mark` before (0) or after (-1) its text; unchanged if it is neither a text nor parts, which are refused later."""
    if content is None or isinstance(content, str) or content == []:
        return mark + (content or "") if place == 0 else (content or "") + mark
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        return content
    parts = [dict(part) for part in content]
    parts[place]["text"] = _joined(parts[place].get("text"), mark, place)
    return parts


def _call(call: Any) -> Any:
    """A tool call whose arguments are an object, parsed if they are text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def chat_format(tokenizer: Any) -> ChatFormat | None:
    """The chat templates of a tokenizer of transformers; None where it has none."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    templates = dict(template) if isinstance(template, Mapping) else {"default": str(template)}
    return ChatFormat(templates, dict(tokenizer.special_tokens_map))


def read_format(chat: Mapping[str, Any] | None) -> ChatFormat | None:
    """The chat templates of a manifest."""
    return ChatFormat(chat["templates"], chat["tokens"]) if chat else None
