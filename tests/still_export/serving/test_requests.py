"""What requests may ask for besides an answer: several answers, log-probabilities, penalties, forms of answers, forced calls."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import numpy as np
import pytest

import still_export
from tests.still_export.serving.conftest import CONTEXT
from tests.still_export.serving.served import Served

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "rain": {"type": "boolean"},
        "kind": {"enum": ["a", "bc"]},
    },
    "required": ["city", "rain", "kind"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in (("now", SCHEMA), ("end", {"type": "object", "properties": {}, "additionalProperties": False}))
]
HELLO = [{"role": "user", "content": "Hello."}]


def test_several_prompts_and_answers(served: Served, model: still_export.LanguageModel) -> None:
    create = served.client().completions.create
    got = create(model="tiny", prompt=["Once", "upon a time"], n=2, max_tokens=9, temperature=0.9, seed=3, echo=True)
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    wanted = [
        prompt + model.generate(prompt, max_tokens=9, temperature=0.9, seed=seed).text
        for prompt in ("Once", "upon a time")
        for seed in (3, 4)
    ]
    assert [choice.text for choice in got.choices] == wanted
    assert got.usage.prompt_tokens == len("Onceupon a time") and got.usage.completion_tokens <= 36
    pieces = ["", "", "", ""]
    for chunk in create(
        model="tiny", prompt=["Once", "upon a time"], n=2, max_tokens=9, temperature=0.9, seed=3, echo=True, stream=True
    ):
        (choice,) = chunk.choices
        pieces[choice.index] += choice.text
    assert pieces == wanted
    status, _ = served.ask("POST", "/v1/completions", {"model": "tiny", "prompt": "a", "n": 100, "max_tokens": 1})
    assert status == 429  # more than rows and queue hold
    assert served.worker.scheduler.queued == 0


def test_logprobs_are_the_models(served: Served, model: still_export.LanguageModel) -> None:
    asked: dict[str, Any] = dict(model="tiny", max_tokens=6, temperature=0.7, seed=1, frequency_penalty=1.5)
    got = served.client().completions.create(prompt="Once", logprobs=3, **asked).choices[0]
    ids = list(b"Once")
    tokenizer = model.text.tokenizer
    read = tokenizer.encode("Once").ids
    for token, logprob, top in zip(
        got.logprobs.tokens, got.logprobs.token_logprobs, got.logprobs.top_logprobs, strict=True
    ):
        model.runner.start()
        logits = np.asarray(model.runner.prefill(read), np.float64).reshape(-1)
        right = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        chosen = [n for n in range(len(right)) if tokenizer.decode([n], skip_special_tokens=False) == token]
        nearest = min(chosen, key=lambda n: abs(right[n] - logprob))
        assert right[nearest] == pytest.approx(logprob, abs=1e-4)
        assert max(top.values()) == pytest.approx(right.max(), abs=1e-4) and len(top) <= 3
        read.append(nearest)
    assert len(read) == len(ids) + 6 and got.logprobs.text_offset[0] == 0
    chat = served.client().chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=2, temperature=0
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 4 and all(
        len(one.top_logprobs) == 2 and one.logprob == one.top_logprobs[0].logprob for one in content
    )
    streamed = served.client().chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=2, temperature=0, stream=True
    )
    found = [
        one.logprob for chunk in streamed if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content
    ]
    assert found == [one.logprob for one in content]


def test_settings_mean_the_same_in_python_and_in_requests(served: Served, model: still_export.LanguageModel) -> None:
    plain = model.generate("Once", max_tokens=30)
    for settings in (
        {"presence_penalty": 1.5},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 3.0},
        {"min_p": 0.3, "temperature": 1.0, "seed": 5},
        {"logit_bias": {7: 100}},
    ):
        wanted = model.generate("Once", max_tokens=30, **settings)
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 30, "temperature": 0, **settings}
        status, got = served.ask("POST", "/v1/completions", body)
        assert status == 200 and got["choices"][0]["text"] == wanted.text != plain.text, settings
    assert model.generate("Once", max_tokens=5, logit_bias={7: 100}).tokens == [7] * 5
    repeated = model.generate("Once", max_tokens=30, repetition_penalty=100.0).tokens
    assert len(set(repeated)) > len(set(plain.tokens))
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    likely = [still_export.runtime.sampling.Sampling(1.0, min_p=0.4, seed=n).choose(logits) for n in range(60)]
    assert set(likely) == {0, 1}


def test_max_tokens_are_clipped(served: Served) -> None:
    for path, body in (("completions", {"prompt": "Once"}), ("chat/completions", {"messages": HELLO})):
        status, got = served.ask(
            "POST", f"/v1/{path}", {"model": "tiny", "max_tokens": 10**30, "temperature": 0, **body}
        )
        assert status == 200 and got["usage"]["total_tokens"] <= CONTEXT
        assert got["choices"][0]["finish_reason"] == "stop" or got["usage"]["total_tokens"] == CONTEXT


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_answers_follow_a_schema(served: Served, model: still_export.LanguageModel, temperature: float) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    asked: dict[str, Any] = dict(model="tiny", max_tokens=100, temperature=temperature, seed=2)
    got = served.client().chat.completions.create(messages=HELLO, response_format=form, n=2, **asked)
    for choice in got.choices:
        jsonschema.validate(json.loads(choice.message.content), {**SCHEMA, "additionalProperties": False})
        assert choice.finish_reason == "stop"
    plain = model.generate(HELLO, max_tokens=100, temperature=temperature, seed=2, response_format=form)
    assert plain.text == got.choices[0].message.content and plain.ended == "end"
    streamed = served.client().chat.completions.create(messages=HELLO, response_format=form, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == plain.text
    _, whole = served.ask("POST", "/v1/completions", {"prompt": "x", "response_format": form, **asked})
    jsonschema.validate(json.loads(whole["choices"][0]["text"]), SCHEMA)
    other = {"type": "json_object", "schema": SCHEMA}  # as in llama.cpp
    assert (
        model.generate(HELLO, max_tokens=100, temperature=temperature, seed=2, response_format=other).text == plain.text
    )
    cut = served.client().chat.completions.create(messages=HELLO, response_format=form, **{**asked, "max_tokens": 3})
    assert cut.choices[0].finish_reason == "length"


def test_some_tools_are_allowed_and_some_have_no_parameters(served: Served) -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "ping"}}]
    ping = {"type": "function", "function": {"name": "ping"}}
    asked: dict[str, Any] = dict(messages=HELLO, tools=tools, temperature=1.0, max_tokens=150, seed=1, model="tiny")
    for mode in ("required", "auto"):
        allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [ping]}}
        (got,) = served.client().chat.completions.create(**asked, tool_choice=allowed).choices
        assert mode == "auto" or all(
            (call.function.name, call.function.arguments) == ("ping", "{}") for call in got.message.tool_calls
        )
    plain = [{"type": "function", "name": "ping"}]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": plain}
    status, said = served.ask(
        "POST",
        "/v1/responses",
        {"model": "tiny", "input": "a", "tools": plain, "tool_choice": allowed, "seed": 1, "max_output_tokens": 150},
    )
    assert status == 200 and {item["arguments"] for item in said["output"] if item["type"] == "function_call"} <= {"{}"}


def test_one_of_is_any_of_and_a_refused_schema_is_named_in_a_line(served: Served) -> None:
    kinds = [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("a", "b")]
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 150, "seed": 1}
    for schema, status in (({"oneOf": kinds}, 200), ({"type": "array", "uniqueItems": True}, 400)):
        form = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        found, said = served.ask("POST", "/v1/chat/completions", {**asked, **form})
        assert found == status, said
        if status == 200:
            assert json.loads(said["choices"][0]["message"]["content"])["kind"] in ("a", "b")
        else:
            assert "uniqueItems" in (message := said["error"]["message"]) and "start:" not in message


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_calls_are_forced(served: Served, model: still_export.LanguageModel, choice: Any) -> None:
    asked: dict[str, Any] = dict(model="tiny", messages=HELLO, tools=TOOLS, temperature=1.0, max_tokens=150)
    for seed in range(3):
        got = served.client().chat.completions.create(tool_choice=choice, parallel_tool_calls=False, seed=seed, **asked)
        assert got.choices[0].finish_reason == "tool_calls" and not got.choices[0].message.content
        (call,) = got.choices[0].message.tool_calls
        schema = dict((t["function"]["name"], t["function"]["parameters"]) for t in TOOLS)[call.function.name]
        jsonschema.validate(json.loads(call.function.arguments), schema)
        assert set(json.loads(call.function.arguments)) <= set(schema["properties"])
        assert choice == "required" or call.function.name == "now"
    answer = model.generate(HELLO, max_tokens=150, tools=TOOLS, tool_choice="now", temperature=1.0, seed=1)
    ((call,),) = [answer.message["tool_calls"]]
    assert call["function"]["name"] == "now"
    for wrong in (
        {"tool_choice": "required", "tools": []},
        {"tool_choice": {"type": "function", "function": {"name": "x"}}},
    ):
        status, said = served.ask("POST", "/v1/chat/completions", {**asked, **wrong})
        assert status == 400 and "tool_choice" in said["error"]["message"]


def test_responses_are_those_of_chats(served: Served) -> None:
    client, text = served.client(), {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}}
    chat = (
        client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=20, temperature=0)
        .choices[0]
        .message.content
    )
    asked: dict[str, Any] = dict(model="tiny", max_output_tokens=20, temperature=0, store=False)
    got = client.responses.create(input="Hello.", **asked)
    assert got.output_text == chat and (got.status, got.usage.output_tokens) == ("incomplete", 20)
    parts = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello."}]}]
    events = list(client.responses.create(input=parts, stream=True, **asked))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (
        "".join(e.delta for e in events if e.type == "response.output_text.delta")
        == chat
        == events[-1].response.output_text
    )
    with client.responses.stream(input="Hello.", text=text, **{**asked, "max_output_tokens": 100}) as stream:
        whole = stream.get_final_response()
    jsonschema.validate(json.loads(whole.output_text), SCHEMA)
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    forced: dict[str, Any] = {
        **asked,
        "max_output_tokens": 150,
        "tools": tools,
        "tool_choice": {"type": "function", "name": "now"},
    }
    (call,) = client.responses.create(input="Hello.", **forced).output
    assert call.type == "function_call" and call.name == "now"
    with client.responses.stream(input="Hello.", **forced) as stream:
        (same,) = stream.get_final_response().output
    assert same.arguments == call.arguments and jsonschema.validate(json.loads(call.arguments), SCHEMA) is None
    later = [*parts, call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    assert client.responses.create(input=later, **asked).output_text
    for wrong, message in (
        ({"previous_response_id": "x"}, "not stored"),
        ({"input": 5}, "input: "),
        ({"background": True}, "background"),
    ):
        status, said = served.ask("POST", "/v1/responses", {"model": "tiny", "input": "a", **wrong})
        assert status == 400 and message in said["error"]["message"]


def test_embeddings_are_refused_in_a_sentence(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="embedding"):
        served.client().embeddings.create(model="tiny", input="a")


NEUTRAL = {
    "typical_p": 1.0,
    "repeat_penalty": 1,
    "skip_special_tokens": True,
    "keep_alive": "5m",
    "top_a": 0,
    "unheard_of": None,
}
NEUTRAL |= {
    "dry_multiplier": 0.0,
    "functions": [],
    "logit_bias": {},
    "suffix": "",
    "xtc_probability": 0,
    "prediction": None,
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_values_of_unserved_fields_pass(served: Served, name: str) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 2, name: NEUTRAL[name]}
    assert served.ask("POST", "/v1/chat/completions", body)[0] == 200
    assert served.ask("POST", "/v1/chat/completions", {**body, name: math.pi})[0] == (
        200 if name in ("keep_alive", "repeat_penalty") else 400
    )
