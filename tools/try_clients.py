"""Ask a running server through the libraries that people use, and print what passes.

    still-export serve DIR &
    python tools/try_clients.py http://127.0.0.1:8000/v1 [LIBRARY ...]

It imports nothing of this project: run it where the libraries are installed, from PyPI: openai, langchain-openai, litellm,
llama-index-llms-openai-like, pydantic-ai-slim[openai], openai-agents, instructor. A library that is not installed is skipped. Open WebUI
and continue.dev are programs: their requests are sent as they write them. What a small model says is not judged, but forms are: JSON by
its schema, calls by their tools, pieces of a stream that make the whole. Exit code 1 where something fails.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any, Literal

from pydantic import BaseModel, Field

URL = MODEL = ""
KEY = os.environ.get("STILL_API_KEY", "none")
FEW = 24
"""Tokens of a free answer."""
MANY = 400
"""Tokens of an answer by a schema, which ends long before."""
QUESTION = "What is the weather in Paris?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=12)
    rain: bool
    wind: Literal["none", "light", "strong"]


SCHEMA = {**Weather.model_json_schema(), "additionalProperties": False}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Reports the weather.", "parameters": SCHEMA},
}


def weather(city: str, wind: str = "none") -> str:
    """Tell the weather.

    Args:
        city: Name of the city.
        wind: How strong the wind is.
    """
    return f"It is sunny in {city}."


CHECKS: list[tuple[str, str, Callable[[], Any]]] = []


def check(library: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a check, named by its function."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        CHECKS.append((library, function.__name__.split("__")[-1], function))
        return function

    return add


def is_weather(found: Any) -> None:
    found = json.loads(found) if isinstance(found, str) else found
    Weather.model_validate(found if isinstance(found, dict) else found.model_dump())


def refused(ask: Callable[[], Any], words: str) -> None:
    """`ask` ends in an error that says so."""
    try:
        ask()
    except Exception as error:
        assert words in str(error), error
    else:
        raise AssertionError("no error")


# openai


def _openai(**options: Any) -> Any:
    import openai

    return openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0, **options)


@check("openai")
def openai__models() -> None:
    assert MODEL in [model.id for model in _openai().models.list()]
    assert _openai().models.retrieve(MODEL).id == MODEL


@check("openai")
def openai__stream_is_the_whole() -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": FEW, "temperature": 0}
    whole = _openai().chat.completions.create(**ask)
    chunks = list(_openai().chat.completions.create(stream=True, stream_options={"include_usage": True}, **ask))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


@check("openai")
def openai__async() -> None:
    import openai

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0) as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=FEW) for _ in range(4))
            )
        assert all(answer.usage and answer.usage.completion_tokens for answer in answers)

    asyncio.run(ask())


@check("openai")
def openai__completions() -> None:
    found = _openai().completions.create(model=MODEL, prompt=["One", "Two"], n=2, max_tokens=8, logprobs=2, seed=1)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert len(found.choices[0].logprobs.tokens) == len(found.choices[0].logprobs.top_logprobs) <= 8
    echoed = _openai().completions.create(model=MODEL, prompt="One", echo=True, max_tokens=4)
    assert echoed.choices[0].text.startswith("One")


@check("openai")
def openai__logprobs() -> None:
    found = _openai().chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, logprobs=True, top_logprobs=3, temperature=0
    )
    for token in found.choices[0].logprobs.content:
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].logprob == token.logprob


@check("openai")
def openai__parse() -> None:
    found = _openai().chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Weather, max_completion_tokens=MANY
    )
    is_weather(found.choices[0].message.parsed)


@check("openai")
def openai__parse_stream() -> None:
    with _openai().chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Weather) as stream:
        kinds = {event.type for event in stream}
        is_weather(stream.get_final_completion().choices[0].message.parsed)
    assert {"content.delta", "content.done"} <= kinds


@check("openai")
def openai__parse_tool() -> None:
    import openai

    tool = openai.pydantic_function_tool(Weather)
    found = _openai().chat.completions.parse(model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="required")
    is_weather(found.choices[0].message.tool_calls[0].function.parsed_arguments)


@check("openai")
def openai__json_object() -> None:
    found = _openai().chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=MANY, seed=1
    )
    if found.choices[0].finish_reason == "stop":
        json.loads(found.choices[0].message.content)


@check("openai")
def openai__tools() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        found = _openai().chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False
        )
        message = found.choices[0].message
        assert found.choices[0].finish_reason == "tool_calls" and len(message.tool_calls) == 1
        is_weather(message.tool_calls[0].function.arguments)
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny."}
        _openai().chat.completions.create(
            model=MODEL, messages=[*MESSAGES, message, result], tools=[TOOL], max_tokens=FEW
        )


@check("openai")
def openai__tools_stream() -> None:
    stream = _openai().chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required", stream=True
    )
    calls = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert calls and calls[0].function.name == "weather"
    is_weather(calls[0].function.arguments)


@check("openai")
def openai__responses() -> None:
    found = _openai().responses.create(model=MODEL, input=QUESTION, max_output_tokens=FEW, instructions="Be short.")
    assert found.output_text
    is_weather(_openai().responses.parse(model=MODEL, input=QUESTION, text_format=Weather).output_parsed)


@check("openai")
def openai__responses_stream() -> None:
    with _openai().responses.stream(model=MODEL, input=QUESTION, text_format=Weather) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        found = stream.get_final_response()
    assert "".join(pieces) == found.output_text
    is_weather(found.output_parsed)


@check("openai")
def openai__responses_tools() -> None:
    tool = {"type": "function", **TOOL["function"]}
    found = _openai().responses.create(model=MODEL, input=QUESTION, tools=[tool], tool_choice="required")
    call = next(item for item in found.output if item.type == "function_call")
    is_weather(call.arguments)
    items = [*MESSAGES, *found.output, {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}]
    assert _openai().responses.create(model=MODEL, input=items, tools=[tool], max_output_tokens=FEW).output


@check("openai")
def openai__embeddings_say_why_not() -> None:
    refused(lambda: _openai().embeddings.create(model=MODEL, input="One"), "embedding")


# LangChain


def _langchain(**options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, max_retries=0, **{"max_tokens": MANY, **options})


@check("langchain_openai")
def langchain__invoke() -> None:
    chat = _langchain(max_tokens=FEW, temperature=0)
    whole = chat.invoke(QUESTION)
    assert whole.usage_metadata["output_tokens"]
    assert "".join(piece.text for piece in chat.stream(QUESTION)) == whole.text
    assert len(chat.batch([QUESTION, "Who are you?"])) == 2


@check("langchain_openai")
def langchain__responses() -> None:
    chat = _langchain(max_tokens=FEW, temperature=0, use_responses_api=True)
    assert "".join(piece.text for piece in chat.stream(QUESTION)) == chat.invoke(QUESTION).text
    is_weather(_langchain(use_responses_api=True).with_structured_output(Weather).invoke(QUESTION))


@check("langchain_openai")
def langchain__logprobs() -> None:
    found = _langchain(max_tokens=8).bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert len(found.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


@check("langchain_openai")
def langchain__structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        is_weather(_langchain().with_structured_output(Weather, method=method).invoke(QUESTION))
    is_weather(_langchain().with_structured_output(Weather, method="json_schema", strict=True).invoke(QUESTION))


@check("langchain_openai")
def langchain__tools() -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    chat = _langchain(max_tokens=FEW).bind_tools([tool(weather)])
    asked = HumanMessage(QUESTION)
    found = _langchain().bind_tools([tool(weather)], tool_choice="any").invoke([asked])
    call = found.tool_calls[0]
    assert call["name"] == "weather" and call["args"]["city"] is not None
    chat.invoke([asked, found, ToolMessage("Sunny.", tool_call_id=call["id"])])


@check("langchain_openai")
def langchain__completions() -> None:
    from langchain_openai import OpenAI

    assert OpenAI(model=MODEL, base_url=URL, api_key=KEY, max_tokens=8).invoke("Once upon a time")


@check("langchain_openai")
def langchain__embeddings_say_why_not() -> None:
    from langchain_openai import OpenAIEmbeddings

    texts = OpenAIEmbeddings(model=MODEL, base_url=URL, api_key=KEY, check_embedding_ctx_length=False, max_retries=0)
    refused(lambda: texts.embed_query("One"), "embedding")


# litellm


def _litellm(function: str = "completion", provider: str = "openai", **options: Any) -> Any:
    import litellm

    litellm.suppress_debug_info = True
    given = {"model": f"{provider}/{MODEL}", "api_base": URL, "api_key": KEY, "num_retries": 0, **options}
    return getattr(litellm, function)(**given)


@check("litellm")
def litellm__completion() -> None:
    for provider in ("openai", "hosted_vllm", "custom_openai"):
        ask: dict[str, Any] = {"messages": MESSAGES, "max_tokens": FEW, "temperature": 0, "provider": provider}
        whole = _litellm(**ask).choices[0].message
        pieces = [chunk.choices[0].delta.content or "" for chunk in _litellm(stream=True, **ask)]
        assert "".join(pieces) == whole.content
        _litellm(messages=[*MESSAGES, whole, *MESSAGES], max_tokens=4, provider=provider)
        _litellm(messages=[*MESSAGES, whole.model_dump(), *MESSAGES], max_tokens=4, provider=provider)


@check("litellm")
def litellm__structured_output() -> None:
    for provider in ("openai", "hosted_vllm"):
        found = _litellm(messages=MESSAGES, response_format=Weather, max_tokens=MANY, provider=provider)
        is_weather(found.choices[0].message.content)


@check("litellm")
def litellm__tools() -> None:
    for provider in ("openai", "hosted_vllm"):
        found = _litellm(messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=MANY, provider=provider)
        message = found.choices[0].message
        is_weather(message.tool_calls[0].function.arguments)
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "name": "weather", "content": "Sunny."}
        for sent in (message, message.model_dump()):
            _litellm(messages=[*MESSAGES, sent, result], tools=[TOOL], max_tokens=4, provider=provider)


@check("litellm")
def litellm__text_and_responses() -> None:
    assert _litellm("text_completion", "text-completion-openai", prompt="One", max_tokens=8).choices[0].text
    found = _litellm("responses", input=QUESTION, max_output_tokens=FEW)
    assert found.output[0].content[0].text


@check("litellm")
def litellm__embeddings_say_why_not() -> None:
    refused(lambda: _litellm("embedding", input=["One"]), "embedding")


# LlamaIndex


def _llama_index(**options: Any) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    given = {"is_chat_model": True, "max_tokens": FEW, "max_retries": 0, "context_window": 8192, **options}
    return OpenAILike(model=MODEL, api_base=URL, api_key=KEY, **given)


@check("llama_index.llms.openai_like")
def llama_index__chat() -> None:
    from llama_index.core.llms import ChatMessage

    chat, asked = _llama_index(temperature=0), [ChatMessage(role="user", content=QUESTION)]
    assert [*chat.stream_chat(asked)][-1].message.content == chat.chat(asked).message.content
    assert _llama_index(is_chat_model=False).complete("Once upon a time").text


@check("llama_index.llms.openai_like")
def llama_index__structured_output() -> None:
    from llama_index.core.prompts import PromptTemplate

    prompt = PromptTemplate("What is the weather in {city}?")
    for calls in (True, False):
        llm = _llama_index(
            is_function_calling_model=calls, should_use_structured_outputs=not calls, max_tokens=MANY, strict=calls
        )
        is_weather(llm.structured_predict(Weather, prompt, city="Paris"))


@check("llama_index.llms.openai_like")
def llama_index__tools() -> None:
    from llama_index.core.tools import FunctionTool

    llm = _llama_index(is_function_calling_model=True, max_tokens=MANY)
    found = llm.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg=QUESTION, tool_required=True)
    assert llm.get_tool_calls_from_response(found)[0].tool_name == "weather"


# Pydantic AI


def _pydantic_ai(responses: bool = False) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    made = OpenAIResponsesModel if responses else OpenAIChatModel
    return made(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))


@check("pydantic_ai")
def pydantic_ai__text() -> None:
    from pydantic_ai import Agent

    for responses in (False, True):
        agent = Agent(_pydantic_ai(responses), instructions="Be short.", model_settings={"max_tokens": FEW})
        first = agent.run_sync(QUESTION)
        assert first.output and agent.run_sync("And now?", message_history=first.all_messages()).output

        async def streamed(agent: Any = agent) -> str:
            async with agent.run_stream(QUESTION) as found:
                return "".join([piece async for piece in found.stream_text(delta=True)])

        assert asyncio.run(streamed())


@check("pydantic_ai")
def pydantic_ai__output_type() -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput

    for responses in (False, True):
        for form in (Weather, ToolOutput(Weather, strict=True), NativeOutput(Weather, strict=True)):
            agent = Agent(_pydantic_ai(responses), output_type=form, model_settings={"max_tokens": MANY}, retries=0)
            is_weather(agent.run_sync(QUESTION).output)


@check("pydantic_ai")
def pydantic_ai__tools() -> None:
    from pydantic_ai import Agent

    called = []
    agent = Agent(_pydantic_ai(), output_type=Weather, model_settings={"max_tokens": MANY, "temperature": 0}, retries=0)

    @agent.tool_plain
    def report(city: Literal["Paris", "Rome"]) -> str:
        called.append(city)
        return "Sunny."

    from pydantic_ai import UsageLimits
    from pydantic_ai.exceptions import UsageLimitExceeded

    try:
        is_weather(agent.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=4)).output)
    except UsageLimitExceeded:  # a small model goes on calling
        assert called


# OpenAI's Agents SDK


def _agents(responses: bool, **options: Any) -> Any:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    made = agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel
    settings = agents.ModelSettings(max_tokens=MANY, temperature=0, **options.pop("settings", {}))
    return agents.Agent(
        "Weather", instructions="Be short.", model=made(MODEL, client), model_settings=settings, **options
    )


@check("agents")
def agents__text() -> None:
    import agents

    async def streamed(agent: Any) -> Any:
        stream = agents.Runner.run_streamed(agent, asked)
        async for _ in stream.stream_events():
            pass
        return stream.final_output

    asked: Any = "What is the capital of France?"
    for responses in (False, True):  # an agent's client is of one event loop
        found = agents.Runner.run_sync(_agents(responses), asked)
        assert found.final_output
        more = [*found.to_input_list(), {"role": "user", "content": asked}]
        assert agents.Runner.run_sync(_agents(responses), more).final_output
        assert asyncio.run(streamed(_agents(responses)))


@check("agents")
def agents__output_type() -> None:
    import agents

    for responses in (False, True):
        is_weather(agents.Runner.run_sync(_agents(responses, output_type=Weather), QUESTION).final_output)


@check("agents")
def agents__tools() -> None:
    import agents

    called = []

    @agents.function_tool
    def report(city: Literal["Paris", "Rome"]) -> str:
        called.append(city)
        return "Sunny."

    for responses in (False, True):
        agent = _agents(responses, tools=[report], settings={"tool_choice": "required"})
        called.clear()
        assert agents.Runner.run_sync(agent, QUESTION).final_output is not None
        assert called  # the SDK forces the first call alone


# instructor


def _instructor_mode(name: str) -> Callable[[], None]:
    """Weather in a mode of instructor. Some force nothing but JSON, or nothing at all: then a small model's answer need only be that."""

    def ask() -> None:
        import instructor
        from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException

        client = instructor.from_openai(_openai(), mode=instructor.Mode[name])
        if name == "RESPONSES_TOOLS":
            is_weather(client.responses.create(model=MODEL, input=QUESTION, response_model=Weather, max_retries=0))
            return
        model: Any = Iterable[Weather] if name == "PARALLEL_TOOLS" else Weather
        try:
            found = client.chat.completions.create(
                model=MODEL, messages=MESSAGES, response_model=model, max_tokens=MANY, max_retries=0
            )
        except (InstructorRetryException, IncompleteOutputException) as error:
            answer: Any = error.last_completion
            if name not in ("JSON", "MD_JSON", "PARALLEL_TOOLS") or answer is None:
                raise
            if name == "JSON" and answer.choices[0].finish_reason == "stop":
                json.loads(answer.choices[0].message.content)
            return
        for each in list(found) if name == "PARALLEL_TOOLS" else [found]:
            is_weather(each)

    return ask


MODES = "TOOLS TOOLS_STRICT FUNCTIONS PARALLEL_TOOLS JSON JSON_O1 JSON_SCHEMA MD_JSON RESPONSES_TOOLS".split()
for mode in MODES:
    CHECKS.append(("instructor", mode, _instructor_mode(mode)))


@check("instructor")
def instructor__partial() -> None:
    import instructor

    for name in ("TOOLS", "JSON_SCHEMA"):
        client = instructor.from_openai(_openai(), mode=instructor.Mode[name])
        found = list(
            client.chat.completions.create_partial(
                model=MODEL, response_model=Weather, messages=MESSAGES, max_retries=0
            )
        )
        is_weather(found[-1])


# programs


def _post(path: str, body: Any) -> tuple[int, str]:
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}", "api-key": KEY, "x-api-key": KEY}
    try:
        request = urllib.request.Request(f"{URL}{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _streamed(path: str, body: Any) -> list[Any]:
    status, text = _post(path, body)
    assert status == 200, text
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@check("Open WebUI")
def webui__chat() -> None:
    """A chat with usage, settings of a model, and the title that is asked for behind it."""
    chat = {"model": MODEL, "messages": [{"role": "system", "content": "Be short."}, *MESSAGES], "stream": True}
    settings = {"temperature": 0.8, "top_p": 0.9, "max_tokens": FEW, "frequency_penalty": 0.0, "stop": ["\n\n\n"]}
    more = {"top_k": 40, "min_p": 0.0, "repeat_penalty": 1.1, "seed": 1, "logit_bias": {}, "tfs_z": 1, "mirostat": 0}
    chunks = _streamed("/chat/completions", {**chat, **settings, **more, "stream_options": {"include_usage": True}})
    assert chunks[-1]["usage"]["completion_tokens"]
    title = {"model": MODEL, "messages": MESSAGES, "stream": False, "max_completion_tokens": FEW}
    assert _post("/chat/completions", title)[0] == 200


@check("Open WebUI")
def webui__native_tools() -> None:
    chat = {"model": MODEL, "messages": MESSAGES, "stream": True, "tools": [TOOL], "max_tokens": FEW}
    _streamed("/chat/completions", chat)
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    turn = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    ]
    _streamed("/chat/completions", {**chat, "messages": [*MESSAGES, *turn]})


@check("continue.dev")
def continue__chat() -> None:
    chat = {"model": MODEL, "max_tokens": FEW, "stream": True, "stream_options": {"include_usage": True}}
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    said = [{"role": "assistant", "content": " "}, {"role": "user", "content": "And now?"}]
    _streamed("/chat/completions", {**chat, "messages": [*parts, *said], "tools": [TOOL], "parallel_tool_calls": False})


@check("continue.dev")
def continue__autocomplete() -> None:
    """By /v1/completions, with the stop texts of its autocomplete."""
    stop = [
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        "<|endoftext|>",
        "\n\n",
        "\r\n\r\n",
        "/src/",
        "```",
        "\ndef ",
    ]
    body = {"model": MODEL, "prompt": "def add(a, b):\n", "max_tokens": FEW, "temperature": 0.01, "stop": stop}
    _streamed("/completions", {**body, "stream": True, "top_p": None, "frequency_penalty": None})


@check("continue.dev")
def continue__fim_says_why_not() -> None:
    status, said = _post("/fim/completions", {"model": MODEL, "prompt": "a", "suffix": "b", "stream": True})
    assert status == 404 and "error" in json.loads(said)


def main() -> int:
    global URL, MODEL
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the server, with /v1")
    parser.add_argument("library", nargs="*", help="only these, as they are imported")
    parser.add_argument("--traceback", action="store_true", help="print errors whole")
    options = parser.parse_args()
    URL = options.url.rstrip("/")
    os.environ.setdefault("OPENAI_API_KEY", KEY)
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    request = urllib.request.Request(f"{URL}/models", headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as answer:
        MODEL = json.load(answer)["data"][0]["id"]
    counts = {"ok": 0, "FAILED": 0, "not installed": 0}
    for library, name, ask in CHECKS:
        if options.library and library not in options.library:
            continue
        begin, said = time.monotonic(), ""
        try:
            if " " not in library and "." not in library and importlib.util.find_spec(library) is None:
                found = "not installed"
            else:
                ask()
                found = "ok"
        except Exception as error:
            found, said = "FAILED", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if isinstance(error, ModuleNotFoundError):
                found = "not installed"
            if options.traceback:
                traceback.print_exc()
        counts[found] += 1
        print(f"{library:30}{name:30}{found:15}{time.monotonic() - begin:5.1f} s  {said}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return int(counts["FAILED"] > 0 or not counts["ok"])


if __name__ == "__main__":
    sys.exit(main())
