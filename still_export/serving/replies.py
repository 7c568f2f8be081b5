"""The JSON of answers, whole or streamed, in OpenAI's form."""

from __future__ import annotations

import json
import secrets
import time
import traceback
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from still_export.runtime.sampling import TokenLogprobs
from still_export.runtime.text import Text
from still_export.serving.requests import Event
from still_export.serving.wire import ApiError, ParsedRequest

FINISHED = {"end": "stop", "stop": "stop", "length": "length"}
"""OpenAI's finish_reason, by end of the answer."""


@dataclass
class Answered:
    """What came of one choice: its text, log-probabilities, number of tokens, and how it ended."""

    text: str = ""
    ended: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tokens: int = 0
    cached: int = 0

    def add(self, event: Event) -> None:
        """Add a piece."""
        self.text += event.text
        self.ended = event.ended or ""
        self.logprobs += event.logprobs


class Reply:
    """The JSON objects that answer one request.

    Args:
        text: Tokenizer, for log-probabilities.
    """

    def __init__(self, request: ParsedRequest, model: str, text: Text | None = None) -> None:
        self.request, self.text = request, text
        kind = "chat.completion" if request.chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._whole = {**self._head, "object": kind}
        self._chunk = {**self._head, "object": "chat.completion.chunk" if request.chat else kind}
        self._offsets = [len(choice.echo) for choice in request.choices]

    def whole(self, answers: Sequence[Answered]) -> dict[str, Any]:
        """The answers in one object."""
        choices = []
        for index, answer in enumerate(answers):
            fields: dict[str, Any] = {"text": self.request.choices[index].echo + answer.text}
            if self.request.chat:
                found = self._split(index, answer.text, True)
                content = None if "tool_calls" in found else ""  # as in OpenAI's API
                fields = {"message": {"role": "assistant", "content": content, "refusal": None, **found}}
            logprobs = self._logprobs(index, answer.logprobs)
            finished = self._finished(fields.get("message", {}), answer.ended)
            choices.append({"index": index, **fields, "logprobs": logprobs, "finish_reason": finished})
        return {**self._whole, "choices": choices, "usage": self.usage(answers)}

    def first(self) -> list[dict[str, Any]]:
        """Chunks before any text."""
        if self.request.chat:
            return [self._of(n, {"role": "assistant", "content": ""}) for n in range(len(self.request.choices))]
        return [self._of(n, {"text": c.echo}) for n, c in enumerate(self.request.choices) if c.echo]

    def piece(self, index: int, event: Event) -> dict[str, Any]:
        """A chunk of a streamed answer."""
        delta = self._split(index, event.text, bool(event.ended)) if self.request.chat else {"text": event.text}
        for number, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = number
        finished = self._finished(delta, event.ended) if event.ended else None
        return self._of(index, delta, finished, self._logprobs(index, event.logprobs))

    def last(self, answers: Sequence[Answered]) -> list[dict[str, Any]]:
        """Chunks after all text."""
        return [{**self._chunk, "choices": [], "usage": self.usage(answers)}] if self.request.include_usage else []

    def usage(self, answers: Sequence[Answered]) -> dict[str, Any]:
        """Tokens of the prompts, of their cached parts, and of the answers."""
        first = {choice.place: n for n, choice in reversed([*enumerate(self.request.choices)])}
        prompt = sum(len(self.request.choices[n].prompt) for n in first.values())
        cached, tokens = sum(answers[n].cached for n in first.values()), sum(answer.tokens for answer in answers)
        counts = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}

    def _split(self, index: int, text: str, ended: bool) -> dict[str, Any]:
        """Reasoning, content and tool calls that are certain after `text`, without empty ones."""
        choice = self.request.choices[index]
        parts = [choice.reasoning.push(text), *([choice.reasoning.end()] if ended else [])]
        thought, content = ("".join(part) for part in zip(*parts, strict=True))
        content, calls = choice.calls.push(content), list[dict[str, Any]]()
        if ended:
            rest, calls = choice.calls.end()
            content += rest
        found = (("reasoning_content", thought), ("content", content), ("tool_calls", calls))
        return {name: value for name, value in found if value}

    def _finished(self, message: Mapping[str, Any], ended: str) -> str:
        return "tool_calls" if message.get("tool_calls") else FINISHED[ended]

    def _of(
        self, index: int, fields: dict[str, Any], finished: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        fields = {"delta": fields} if self.request.chat else fields
        usage = {"usage": None} if self.request.include_usage else {}
        choice = {"index": index, **fields, "logprobs": logprobs, "finish_reason": finished}
        return {**self._chunk, "choices": [choice], **usage}

    def _logprobs(self, index: int, found: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """OpenAI's objects; None if none are asked for."""
        if self.request.choices[index].sampling.logprobs is None or self.text is None:
            return None
        decode = self.text.decode

        def word(token: int) -> str:
            return decode([token], skip_special=False)

        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = word(token)
            known = None if "\ufffd" in text else list(text.encode())  # a part of a character
            return {"token": text, "logprob": logprob, "bytes": known}

        if self.request.chat:
            content = [
                {**entry(one.token, one.logprob), "top_logprobs": [entry(*pair) for pair in one.top]} for one in found
            ]
            return {"content": content, "refusal": None}
        tokens = [word(one.token) for one in found]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [{word(token): logprob for token, logprob in one.top} for one in found],
            "text_offset": offsets,
        }


def line(value: object) -> str:
    """One event of a streamed answer."""
    return f"data: {json.dumps(value)}\n\n"


async def to_the_end(events: AsyncIterable[Any]) -> AsyncIterator[Any]:
    """Events of another server's streamed answer. If they break off, an error comes last, which clients recognize."""
    try:
        async for event in events:
            yield event
    except Exception as error:  # the status has already been sent
        traceback.print_exception(error)
        yield line(ApiError(503, "the answer broke off: the model's process failed. Ask again.").to_dict())
