"""OpenAI's requests and answers: accepted fields, refusals, and the JSON of answers."""

from __future__ import annotations

import json
import secrets
import time
import traceback
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, FailFast, Field, ValidationError

from still_export.package.chat_format import REASONING
from still_export.runtime.grammar import LarkGrammar, answer_lark
from still_export.runtime.reasoning import Reasoning
from still_export.runtime.sampling import SETTINGS, RunError, Sampling, TokenLogprobs
from still_export.runtime.stop_texts import StopTexts
from still_export.runtime.text import NO_MARKS, Text
from still_export.runtime.tool_calls import ToolCalls
from still_export.serving.requests import Event

MOST_STOPS = 16
"""Most stop texts of a request."""

MOST_CHOICES = 128
"""Most answers of a request."""

MOST_LOGPROBS = 20
"""Most likeliest tokens beside each token, as in OpenAI's API."""

DEFAULT_TOKENS = 16
"""Default max_tokens of /v1/completions, as in OpenAI's API."""

MOST_MESSAGE = 1000
"""Most characters of an error; some quote the request."""

MEANINGLESS = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "verbosity", "prompt_cache_retention"),
        *("cache_prompt", "keep_alive"),
    )
)
"""Fields that do not change any token."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
    **dict.fromkeys(
        ("typical_p", "typ_p", "tfs_z", "epsilon_cutoff", "eta_cutoff", "length_penalty", "dynatemp_exponent"), (1,)
    ),
}
"""Unsupported fields, with the values by which nothing is asked for; for every other field these are null, false, 0 and empty ones."""


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


class NamedFunction(_Strict):
    """A tool by its name."""

    name: str


class NamedTool(_Strict):
    """The choice of one tool."""

    type: Literal["function"] = "function"
    function: NamedFunction


class Generation(_Strict):
    """Fields of both kinds of requests."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = Field(
        None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(None, ge=-1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    response_format: dict[str, Any] | None = None
    stop: str | Listed[str] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class Completion(Generation):
    """A request to /v1/completions."""

    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    echo: bool | None = None
    logprobs: int | bool | None = None


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
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    documents: Listed[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


@dataclass(frozen=True)
class Choice:
    """One of the answers that a request asks for.

    place: Of its prompt in the request. reasoning, calls: Parsers that separate these from content. echo: Text before the answer.
    """

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    place: int = 0
    reasoning: Reasoning = field(default_factory=lambda: Reasoning(None, False))
    calls: ToolCalls = field(default_factory=lambda: ToolCalls(None))
    echo: str = ""


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed request that can be submitted.

    chat: It has messages. include_usage: A streamed answer ends with its usage. marks: Tokens whose texts are shown although they are
    special. salt: Requests with the same one share cached prefixes.
    """

    chat: bool
    choices: list[Choice]
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    marks: Mapping[int, str] = field(default_factory=dict)
    salt: str | None = None


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
        if not value or name in MEANINGLESS or any(_same(value, x) for x in NEUTRAL.get(name, ())):
            continue
        raise ApiError(400, f"{name[:64]} is not served here. Leave it out.", name[:64], "unsupported_parameter")
    if request.model != served:
        message = f"the model {request.model[:64]!r} does not exist here; this server has {served!r}."
        raise ApiError(404, message, "model", "model_not_found")
    return request


def _same(value: object, neutral: object) -> bool:
    return type(value) in (type(neutral), float if type(neutral) is int else type(neutral)) and value == neutral


def to_submit(
    request: Completion | Chat, text: Text, context: int, vocabulary: int, warm: bool = False
) -> ParsedRequest:
    """Convert a request for the scheduler.

    Args:
        text: Tokenizer and chat format.
        vocabulary: Tokens of the model.
        warm: It is read ahead: the last message of a chat goes on in later requests.

    Raises:
        ApiError: The prompt cannot be read, or does not fit.
    """
    chat = isinstance(request, Chat)
    where = "messages" if chat else "prompt"
    count = 1 if warm else request.n or 1
    try:
        prompts = [_chat_ids(request, text, warm)] if isinstance(request, Chat) else _prompts(request.prompt, text)
        lark = _lark(request, text, prompts[0])
        samplings = [_sampling(request, n) for _ in prompts for n in range(count)]
        for sampling in samplings if lark else ():
            sampling.grammar = LarkGrammar(text, vocabulary, lark)
    except RunError as error:
        raise ApiError(400, str(error), where) from None
    if len(samplings) > MOST_CHOICES:
        raise ApiError(400, f"prompt: {len(samplings)} answers are asked for; the limit is {MOST_CHOICES}.", where)
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if len(stop) > MOST_STOPS:
        raise ApiError(400, f"stop: give at most {MOST_STOPS} texts.", "stop")
    try:
        StopTexts(stop)
    except RunError as error:
        raise ApiError(400, f"stop: {error}", "stop") from None
    echo = isinstance(request, Completion) and bool(request.echo)
    choices, tools = [], request.tools if isinstance(request, Chat) and request.tool_choice != "none" else None
    for number, sampling in enumerate(samplings):
        place = number // count
        prompt = prompts[place]
        room = context - len(prompt)
        if room < 1:
            message = f"this model's context holds {context} tokens; the prompt has {len(prompt)}. Shorten it."
            raise ApiError(400, message, where, "context_length_exceeded")
        most = min(1 if warm else _most(request) or room, room)
        reasoning, calls, written = Reasoning(None, False), ToolCalls(None), ""
        if isinstance(request, Chat):
            calls, reasoning = _calls(request, tools, text), text.reasoning(prompt)
        elif echo:
            written = text.tokenizer.decode(prompt)
        choices.append(Choice(prompt, most, sampling, place, reasoning, calls, written))
    usage = bool(request.stream_options and request.stream_options.include_usage)
    # Special tokens may belong to calls, also in a notation that is unknown here.
    marks = {**(text.special_tokens if tools else {}), **text.marks} if chat else NO_MARKS
    salt = request.cache_salt or request.prompt_cache_key
    return ParsedRequest(chat, choices, stop, bool(request.ignore_eos), bool(request.stream), usage, marks, salt)


def _most(request: Generation) -> int | None:
    """Most tokens of an answer; None: as many as fit."""
    if isinstance(request, Chat):
        return request.max_completion_tokens or request.max_tokens
    return request.max_tokens or DEFAULT_TOKENS


def _sampling(request: Completion | Chat, number: int) -> Sampling:
    """How the tokens of one answer are chosen; the defaults are OpenAI's."""
    values = {entry.name: value for entry in SETTINGS if (value := getattr(request, entry.name)) is not None}
    values["top_k"] = max(0, values.get("top_k", 0))  # -1 means "all" in other APIs
    seed = values.get("seed", -1)
    values["seed"] = secrets.randbits(63) if seed == -1 else seed + number
    logprobs = int(request.logprobs) if request.logprobs else None
    if isinstance(request, Chat):
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
    elif request.logprobs == 0 and request.logprobs is not False and request.logprobs is not None:
        logprobs = 0
    if logprobs is not None and not 0 <= logprobs <= MOST_LOGPROBS:
        raise RunError(f"logprobs={logprobs}: give 0 to {MOST_LOGPROBS}.")
    if logprobs is not None and isinstance(request, Completion) and request.echo:
        raise RunError("echo with logprobs is not served here: a prompt's own log-probabilities are not computed.")
    try:
        bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    except ValueError:
        raise RunError("logit_bias: the keys must be token ids.") from None
    if not all(abs(value) <= 100 for value in bias.values()):
        raise RunError("logit_bias: values must be between -100 and 100.")
    return Sampling(**{"temperature": 1.0, **values}, logit_bias=bias, logprobs=logprobs)


def _lark(request: Completion | Chat, text: Text, prompt: list[int]) -> str:
    """The grammar of the answer; "": it is free."""
    if not isinstance(request, Chat):
        return answer_lark(text, prompt, request.response_format)
    choice = request.tool_choice.function.name if isinstance(request.tool_choice, NamedTool) else request.tool_choice
    one = request.parallel_tool_calls is False
    return answer_lark(text, prompt, request.response_format, request.tools, choice, one)


def _calls(request: Chat, tools: list[dict[str, Any]] | None, text: Text) -> ToolCalls:
    """The separator of calls and content; without tools nothing is a call."""
    return ToolCalls.of(text, tools or None, request.parallel_tool_calls is False)


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


def _prompts(prompt: str | list[str] | list[int] | list[list[int]], text: Text) -> list[list[int]]:
    """Token ids of each prompt."""
    listed = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    return [text.encode(one) if isinstance(one, str) else [n for n in one if isinstance(n, int)] for one in listed]  # type: ignore[union-attr]


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
        decode = self.text.tokenizer.decode

        def word(token: int) -> str:
            return decode([token], skip_special_tokens=False)

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
