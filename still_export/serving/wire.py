"""OpenAI's requests and answers: accepted fields, refusals, and the JSON of answers."""

from __future__ import annotations

import json
import secrets
import time
import traceback
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from still_export.package.chat_format import REASONING
from still_export.runtime.reasoning import Reasoning
from still_export.runtime.sampling import RunError, Sampling
from still_export.runtime.stop_texts import StopTexts
from still_export.runtime.text import NO_MARKS, Text
from still_export.runtime.tool_calls import ToolCalls

MOST_STOPS = 4
"""Most stop texts of a request, as in OpenAI's API."""

DEFAULT_TOKENS = 16
"""Default max_tokens of /v1/completions, as in OpenAI's API."""

MOST_MESSAGE = 1000
"""Most characters of an error; some quote the request."""

MEANINGLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
)
"""Fields that do not change any token."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Unsupported fields, with the values that mean nothing is requested."""


MESSAGE_FIELDS = frozenset(("name", "tool_calls", "tool_call_id", *REASONING))
"""Fields of a message besides role and content."""


class ApiError(Exception):
    """An error response in OpenAI's form.

    Args:
        code: OpenAI's name of the error.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message if len(message) <= MOST_MESSAGE else f"{message[:MOST_MESSAGE]} ...")
        self.status, self.param, self.code = status, param, code

    def to_dict(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class _AtFirst(FailFast):
    __hash__ = object.__hash__  # pydantic's class has none, and a union needs one


Item = TypeVar("Item")
Listed = Annotated[list[Item], _AtFirst()]
"""A list that reports only its first wrong item; a list of a million items would make as many errors."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class Generation(_Strict):
    """Fields of both kinds of requests."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-1)
    stop: str | Listed[str] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class Completion(Generation):
    """A request to /v1/completions."""

    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]


class Message(_Strict):
    """A message of a chat; the chat format defines its content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None

    def plain(self, number: int) -> dict[str, Any]:
        """The message in the form that chat templates read.

        Args:
            number: Place in the chat, from 1.

        Raises:
            ApiError: It has an unknown field.
        """
        unknown_fields = {
            name: value for name, value in (self.model_extra or {}).items() if value not in (None, [], "")
        }
        if unknown := [name for name in unknown_fields if name not in MESSAGE_FIELDS]:
            raise ApiError(400, f"{unknown[0][:64]} of message {number} is not served here. Leave it out.", "messages")
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content, **unknown_fields}


class Chat(Generation):
    """A request to /v1/chat/completions; fields that OpenAI does not have are vLLM's."""

    messages: Listed[Message]
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    documents: Listed[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed request that can be submitted.

    chat: It has messages. include_usage: A streamed answer ends with its usage. marks: Tokens around reasoning (see `Text.marks`) and
    before tool calls. reasoning, calls: Parsers that separate these from content.
    """

    chat: bool
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    marks: Mapping[int, str]
    reasoning: Reasoning
    calls: ToolCalls = field(default_factory=lambda: ToolCalls(None))


Kind = TypeVar("Kind", bound=Generation)


def understood(kind: type[Kind], body: object, served: str) -> Kind:
    """Validate a request of this kind.

    Raises:
        ApiError: A field is missing, wrong or not supported; or the request names another model.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {type(body).__name__}, not an object with fields.")
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        if not found[0]["loc"]:
            raise ApiError(400, f"the name of a field is not text: {found[0]['msg']}.", None, "invalid_value") from None
        # Each form of a union reports an error; the field is common to all.
        name = str(found[0]["loc"][0])
        where = ".".join(str(part) for part in found[0]["loc"]) if len(found) == 1 else name
        raise ApiError(400, f"{where}: {found[0]['msg']}.", name, "invalid_value") from None
    for name, value in (request.model_extra or {}).items():
        if value is None or name in MEANINGLESS or any(_same(value, x) for x in NEUTRAL.get(name, ())):
            continue
        known = "not served here" if name in NEUTRAL else "unknown to this server"
        raise ApiError(400, f"{name[:64]} is {known}. Leave it out.", name[:64], "unsupported_parameter")
    if request.model != served:
        message = f"the model {request.model[:64]!r} does not exist here; this server has {served!r}."
        raise ApiError(404, message, "model", "model_not_found")
    return request


def _same(value: object, neutral: object) -> bool:
    return type(value) in (type(neutral), float if type(neutral) is int else type(neutral)) and value == neutral


def to_submit(request: Completion | Chat, text: Text, context: int, warm: bool = False) -> ParsedRequest:
    """Convert a request for the scheduler.

    Args:
        text: Tokenizer and chat format.
        warm: It is read ahead: the last message of a chat goes on in later requests.

    Raises:
        ApiError: The prompt cannot be read, or does not fit.
    """
    chat = isinstance(request, Chat)
    try:
        prompt = _chat_ids(request, text, warm) if isinstance(request, Chat) else _prompt_ids(request.prompt, text)
        sampling = Sampling(
            1.0 if request.temperature is None else request.temperature,
            max(0, request.top_k or 0),  # -1 means "all" in other APIs
            1.0 if request.top_p is None else request.top_p,
            secrets.randbits(63) if request.seed in (None, -1) else request.seed,
        )
    except RunError as error:
        raise ApiError(400, str(error), "messages" if chat else "prompt") from None
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if len(stop) > MOST_STOPS:
        raise ApiError(400, f"stop: give at most {MOST_STOPS} texts.", "stop")
    try:
        StopTexts(stop)
    except RunError as error:
        raise ApiError(400, f"stop: {error}", "stop") from None
    most = request.max_tokens
    if isinstance(request, Chat):
        most = request.max_completion_tokens or most
    most = 1 if warm else most
    room = context - len(prompt)
    if room < (most or 1):
        requested = f" and {most} are asked for" if most else ""
        message = f"this model's context holds {context} tokens; the prompt has {len(prompt)}{requested}. Shorten one of them."
        raise ApiError(400, message, "messages" if chat else "prompt", "context_length_exceeded")
    streamed = bool(request.stream)
    usage = bool(request.stream_options and request.stream_options.include_usage)
    most = most or (room if chat else min(room, DEFAULT_TOKENS))
    marks, reasoning, calls = NO_MARKS, Reasoning(None, False), ToolCalls(None)
    if isinstance(request, Chat):
        calls = _calls(request, text)
        # Special tokens may belong to calls, also in a notation that is unknown here.
        marks = text.marks if calls.tools is None else {**text.special_tokens, **text.marks}
        reasoning = text.reasoning(prompt)
    return ParsedRequest(
        chat, prompt, most, sampling, stop, bool(request.ignore_eos), streamed, usage, marks, reasoning, calls
    )


def _calls(request: Chat, text: Text) -> ToolCalls:
    """The separator of calls and content; without tools nothing is a call."""
    if not request.tools or request.tool_choice == "none" or not text.chat:
        return ToolCalls(None)
    words = (token.content for token in text.tokenizer.get_added_tokens_decoder().values())
    return ToolCalls(request.tools, [*text.chat.templates.values(), *words])


def _chat_ids(request: Chat, text: Text, warm: bool) -> list[int]:
    if not text.chat:
        raise RunError("this model has no chat format; use /v1/completions.")
    messages = [message.plain(number) for number, message in enumerate(request.messages, 1)]
    arguments = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", request.reasoning_effort)
    if request.documents is not None:
        arguments["documents"] = request.documents
    goes_on = request.continue_final_message
    if goes_on is None and request.add_generation_prompt is not None:
        goes_on = False
    reply = request.add_generation_prompt is not False
    return text.dialogue(messages, tools=request.tools, arguments=arguments, goes_on=warm or goes_on, reply=reply)


def _prompt_ids(prompt: str | list[str] | list[int] | list[list[int]], text: Text) -> list[int]:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise RunError(f"prompt has {len(prompt)} texts; send one request for each.")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return text.encode(prompt)
    return [token for token in prompt if isinstance(token, int)]


FINISHED = {"end": "stop", "stop": "stop", "length": "length"}
"""OpenAI's finish_reason, by end of the answer."""


class Reply:
    """The JSON objects that answer one request."""

    def __init__(self, request: ParsedRequest, model: str) -> None:
        self.request = request
        kind = "chat.completion" if request.chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._whole = {**self._head, "object": kind}
        self._chunk = {**self._head, "object": "chat.completion.chunk" if request.chat else kind}

    def whole(self, text: str, ended: str, tokens: int, cached: int = 0) -> dict[str, Any]:
        """The answer in one object."""
        fields: dict[str, Any] = {"text": text}
        if self.request.chat:
            found = self._split(text, True)
            content = None if "tool_calls" in found else ""  # as in OpenAI's API
            fields = {"message": {"role": "assistant", "content": content, "refusal": None, **found}}
        choice = {
            "index": 0,
            **fields,
            "logprobs": None,
            "finish_reason": self._finished(fields.get("message", {}), ended),
        }
        return {**self._whole, "choices": [choice], "usage": self.usage(tokens, cached)}

    def first(self) -> list[dict[str, Any]]:
        """Chunks before any text."""
        return [self._of({"role": "assistant", "content": ""})] if self.request.chat else []

    def piece(self, text: str, ended: str | None = None) -> dict[str, Any]:
        """A chunk of a streamed answer."""
        delta = self._split(text, bool(ended)) if self.request.chat else {"text": text}
        for number, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = number
        return self._of(delta, self._finished(delta, ended) if ended else None)

    def last(self, tokens: int, cached: int = 0) -> list[dict[str, Any]]:
        """Chunks after all text."""
        usage = self.usage(tokens, cached)
        return [{**self._chunk, "choices": [], "usage": usage}] if self.request.include_usage else []

    def usage(self, tokens: int, cached: int = 0) -> dict[str, Any]:
        """Tokens of the prompt, of its `cached` part, and of the answer."""
        prompt = len(self.request.prompt)
        counts = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}

    def _split(self, text: str, ended: bool) -> dict[str, Any]:
        """Reasoning, content and tool calls that are certain after `text`, without empty ones."""
        parts = [self.request.reasoning.push(text), *([self.request.reasoning.end()] if ended else [])]
        thought, content = ("".join(part) for part in zip(*parts, strict=True))
        content, calls = self.request.calls.push(content), list[dict[str, Any]]()
        if ended:
            rest, calls = self.request.calls.end()
            content += rest
        found = (("reasoning_content", thought), ("content", content), ("tool_calls", calls))
        return {name: value for name, value in found if value}

    def _finished(self, message: Mapping[str, Any], ended: str) -> str:
        return "tool_calls" if message.get("tool_calls") else FINISHED[ended]

    def _of(self, fields: dict[str, Any], finished: str | None = None) -> dict[str, Any]:
        fields = {"delta": fields} if self.request.chat else fields
        usage = {"usage": None} if self.request.include_usage else {}
        choice = {"index": 0, **fields, "logprobs": None, "finish_reason": finished}
        return {**self._chunk, "choices": [choice], **usage}


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
