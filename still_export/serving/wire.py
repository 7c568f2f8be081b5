"""OpenAI's requests: accepted fields, refusals, and what is submitted for them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError

from still_export.package.chat_format import REASONING
from still_export.runtime.grammar import LarkGrammar, answer_lark
from still_export.runtime.reasoning import Reasoning
from still_export.runtime.sampling import SETTINGS, RunError, Sampling
from still_export.runtime.stop_texts import StopTexts
from still_export.runtime.text import NO_MARKS, Text
from still_export.runtime.tool_calls import ToolCalls

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
        *("cache_prompt", "keep_alive", "priority", "request_id", "id_slot", "timings_per_token", "return_progress"),
    )
)
"""Fields that do not change any token."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_format": ("auto", "deepseek"),
    **dict.fromkeys(
        ("typical_p", "typ_p", "tfs_z", "epsilon_cutoff", "eta_cutoff", "length_penalty", "dynatemp_exponent"), (1,)
    ),
}
"""Unsupported fields, with the values by which nothing is asked for besides null, false, 0 and empty ones."""

DONE = frozenset(
    (
        *("skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens", "detokenize", "do_sample"),
        *("include_reasoning", "parse_tool_calls", "separate_reasoning"),
    )
)
"""Fields for what is always done; false asks for something else."""

SWITCHES = {
    "dry_": "dry_multiplier",
    "xtc_": "xtc_probability",
    "mirostat_tau": "mirostat",
    "mirostat_eta": "mirostat",
    "dynatemp_": "dynatemp_range",
    "smoothing_": "smoothing_factor",
    "repeat_last_n": "repetition_penalty",
}
"""Beginnings of fields that have no effect where another field is off."""


MESSAGE_FIELDS = frozenset(("name", "tool_calls", "tool_call_id", *REASONING))
"""Fields of a message besides role and content."""

MESSAGE_NOTES = frozenset(
    ("id", "type", "status", "metadata", "annotations", "cache_control", "timestamp", "provider_specific_fields")
)
"""Fields of a message that do not change any token."""


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


Int = Annotated[int, BeforeValidator(lambda value: int(value) if _is_whole(value) else value)]
"""A whole number, also as some clients write it: 64.0."""


def _is_whole(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()


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


class ToolSet(_Strict):
    """Some of the tools, of which one may or must be called."""

    mode: Literal["auto", "required"]
    tools: Listed[NamedTool]


class AllowedTools(_Strict):
    """The choice of some tools."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSet


class Generation(_Strict):
    """Fields of both kinds of requests."""

    model: str
    max_tokens: Int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Int | None = Field(None, ge=-1)
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = Field(
        None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    logit_bias: dict[Annotated[int, Field(strict=False)], Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Int | None = Field(None, ge=-1)
    n: Int | None = Field(None, ge=1, le=MOST_CHOICES)
    response_format: dict[str, Any] | None = None
    stop: str | Annotated[Listed[str], Field(max_length=MOST_STOPS)] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class Completion(Generation):
    """A request to /v1/completions."""

    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    echo: bool | None = None
    logprobs: Annotated[Int, Field(ge=0, le=MOST_LOGPROBS)] | bool | None = None


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
            name: value
            for name, value in (self.model_extra or {}).items()
            if value not in (None, [], "") and name not in MESSAGE_NOTES
        }
        if unknown := [name for name in unknown_fields if name not in MESSAGE_FIELDS]:
            raise ApiError(400, f"{unknown[0][:64]} of message {number} is not served here. Leave it out.", "messages")
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content, **unknown_fields}


class Chat(Generation):
    """A request to /v1/chat/completions; fields that OpenAI does not have are vLLM's."""

    messages: Listed[Message]
    max_completion_tokens: Int | None = Field(None, ge=1)
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    documents: Listed[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
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
        # Each form of a union reports an error; the field is common to all, and a value of the right type says most.
        said = next((each for each in found if not each["type"].endswith("_type")), found[0])
        name = str(said["loc"][0])
        where = ".".join(str(part) for part in said["loc"]) if len(found) == 1 else name
        raise ApiError(400, f"{where}: {said['msg']}.", name, "invalid_value") from None
    extra = request.model_extra or {}
    for name, value in extra.items():
        switch = next((switch for begin, switch in SWITCHES.items() if name.startswith(begin) and name != switch), "")
        if value is None or name in MEANINGLESS or (switch and getattr(request, switch, None) in (None, False, 0, 1)):
            continue
        if value is True if name in DONE else not value or any(_same(value, x) for x in NEUTRAL.get(name, ())):
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
    try:
        StopTexts(stop)
    except RunError as error:
        raise ApiError(400, f"stop: {error}", "stop") from None
    echo = isinstance(request, Completion) and bool(request.echo)
    choices, (tools, choice) = [], _chosen(request) if isinstance(request, Chat) else (None, None)
    tools = None if choice == "none" else tools
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
            written = text.decode(prompt)
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
    wanted = (request.top_logprobs or 0) if isinstance(request, Chat) and request.logprobs else request.logprobs
    logprobs = None if wanted is None or wanted is False else int(wanted)
    if logprobs is not None and isinstance(request, Completion) and request.echo:
        raise RunError("echo with logprobs is not served here: a prompt's own log-probabilities are not computed.")
    return Sampling(**{"temperature": 1.0, **values}, logit_bias=request.logit_bias or {}, logprobs=logprobs)


def _lark(request: Completion | Chat, text: Text, prompt: list[int]) -> str:
    """The grammar of the answer; "": it is free."""
    if not isinstance(request, Chat):
        return answer_lark(text, prompt, request.response_format)
    tools, choice = _chosen(request)
    return answer_lark(text, prompt, request.response_format, tools, choice, request.parallel_tool_calls is False)


def _chosen(request: Chat) -> tuple[list[dict[str, Any]] | None, str | None]:
    """The tools that may be called, and none, auto, required, or one tool's name."""
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        return request.tools, choice.function.name
    if not isinstance(choice, AllowedTools):
        return request.tools, choice
    names = [tool.function.name for tool in choice.allowed_tools.tools]
    functions = [(tool, tool.get("function")) for tool in request.tools or ()]
    return [t for t, f in functions if isinstance(f, dict) and f.get("name") in names], choice.allowed_tools.mode


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
    if request.enable_thinking is not None:
        arguments.setdefault("enable_thinking", request.enable_thinking)
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
