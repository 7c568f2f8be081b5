"""OpenAI's interface: the real client, requests of every wrong form, clients that leave, a server that ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import still_export
from still_export.package.chat_format import ChatFormat
from still_export.runtime.prefixes import PrefixCache
from still_export.serving.app import Settings
from still_export.serving.server import listen
from tests.still_export.serving.conftest import CONTEXT
from tests.still_export.serving.served import JSON, Served, serve
from tests.still_export.verbs import call

openai = pytest.importorskip("openai")
KEY = "sésame"


def test_completions_are_those_of_run(served: Served, model: still_export.LanguageModel) -> None:
    client = served.client()
    assert [m.id for m in client.models.list().data] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"
    for prompt, options in (
        ("Once upon a time", {}),
        ("Straße, 世界", {"max_tokens": 50}),
        ([7, 8, 9], {"max_tokens": 20}),
        ("sampled", {"max_tokens": 30, "temperature": 0.9, "top_p": 0.8, "seed": 5}),
        ("stopped", {"max_tokens": 60, "stop": ["e", "\ufffd"]}),
    ):
        asked = {"max_tokens": 16, "temperature": 0, **options}
        wanted = model.generate(prompt, **asked)
        got = client.completions.create(model="tiny", prompt=prompt, **asked)
        assert got.choices[0].text == wanted.text
        assert got.choices[0].finish_reason == {"length": "length"}.get(wanted.ended, "stop")
        assert got.usage.prompt_tokens == wanted.prompt_tokens and got.usage.completion_tokens == len(wanted.tokens)
        streamed = list(
            client.completions.create(
                model="tiny", prompt=prompt, stream=True, stream_options={"include_usage": True}, **asked
            )
        )
        assert "".join(c.choices[0].text for c in streamed if c.choices) == wanted.text
        assert streamed[-1].usage == got.usage and streamed[-2].choices[0].finish_reason == got.choices[0].finish_reason
    # seeds that nobody gave differ
    texts = {client.completions.create(model="tiny", prompt="a", max_tokens=30).choices[0].text for _ in range(3)}
    assert len(texts) == 3


def test_prefixes_are_read_ahead_and_counted(byte_package: Path, model: still_export.LanguageModel) -> None:
    def open_cache(runner: Any) -> PrefixCache:
        return PrefixCache(runner.table, 1 << 28)

    with serve(byte_package, Settings("tiny", None, 50_000), rows=2, piece=16, cache=open_cache) as served:
        document = {"role": "user", "content": "The ship left the harbour at dawn."}
        body = {"model": "tiny", "messages": [document]}
        status, warmed = served.ask("POST", "/v1/prefixes", body)
        tokens = warmed["usage"]["prompt_tokens"]
        assert status == 200 and tokens > 30 and warmed["usage"]["completion_tokens"] == 0
        asked = [{"role": "user", "content": document["content"] + " When?"}]
        got = served.client().chat.completions.create(model="tiny", messages=asked, max_tokens=9, temperature=0)
        assert got.usage.prompt_tokens_details.cached_tokens == tokens
        assert got.choices[0].message.content == model.generate(asked, max_tokens=9).text
        figures = dict(
            line.split(" ") for line in served.ask("GET", "/metrics")[1].splitlines() if line.startswith("still_prefix")
        )
        assert float(figures["still_prefixes"]) >= 4 and float(figures["still_prefix_bytes"]) > 1000
        assert float(figures["still_prefix_hit_rate"]) == pytest.approx(tokens / (tokens + got.usage.prompt_tokens))
        for wrong, message in (
            ({"model": "tiny"}, "prompt: Field required"),
            ({"model": "tiny", "prompt": "a", "messages": [document]}, "prompt is not"),
            ({"model": "tiny", "prompt": "a" * CONTEXT}, "context holds"),
            ({"model": "tiny", "prompt": "a", "mirostat": 3}, "mirostat is not served here"),
            ({"model": "tiny", "messages": []}, "no messages"),
        ):
            status, said = served.ask("POST", "/v1/prefixes", wrong)
            assert status == 400 and message in said["error"]["message"], said


def test_no_prefixes_are_kept_without_a_cache(served: Served) -> None:
    status, said = served.ask("POST", "/v1/prefixes", {"model": "tiny", "prompt": "a"})
    assert status == 400 and "--prefix-cache" in said["error"]["message"]


def test_ignore_eos(served: Served, model: still_export.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"model": "tiny", "prompt": "Once", "max_tokens": 16, "temperature": 0}
    wanted = model.generate("Once", max_tokens=16).tokens
    monkeypatch.setattr(served.worker.scheduler, "_ends", [wanted[3]])
    create = served.client().completions.create
    for extra, tokens, reason in (
        ({}, wanted.index(wanted[3]), "stop"),
        ({"ignore_eos": False}, wanted.index(wanted[3]), "stop"),
        ({"ignore_eos": True}, 16, "length"),
    ):
        got = create(**asked, extra_body=extra)
        assert (got.usage.completion_tokens, got.choices[0].finish_reason) == (tokens, reason)
    assert got.choices[0].text == model.generate("Once", max_tokens=16).text


def test_chats_are_those_of_run(served: Served, model: still_export.LanguageModel) -> None:
    client = served.client()
    messages = [{"role": "user", "content": "Hello."}]
    for said in (
        messages,
        [*messages, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Why?"}],
    ):
        wanted = model.generate(said, max_tokens=20)
        parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in said]
        got = client.chat.completions.create(model="tiny", messages=parts, max_completion_tokens=20, temperature=0)
        assert got.choices[0].message.content == wanted.text and got.choices[0].message.role == "assistant"
        chunks = list(
            client.chat.completions.create(model="tiny", messages=said, max_tokens=20, temperature=0, stream=True)
        )
        assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == wanted.text
    # Without max_tokens an answer may take what the context has.
    got = client.chat.completions.create(model="tiny", messages=messages, temperature=0)
    assert got.usage.total_tokens == CONTEXT or got.choices[0].finish_reason == "stop"


BASE = {"model": "tiny", "prompt": "a", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.mark.parametrize(
    "change, status, message",
    [
        ({"model": "other"}, 404, "'other' does not exist here; this server has 'tiny'"),
        ({"n": 0}, 400, "n: "),
        ({"n": 1000}, 400, "n: "),
        ({"best_of": 3}, 400, "best_of is not"),
        ({"echo": True, "logprobs": 0}, 400, "echo with logprobs is not"),
        ({"logit_bias": {"a": 1}}, 400, "logit_bias.a"),
        ({"logit_bias": {"5": 1e9}}, 400, "logit_bias.5: "),
        ({"logprobs": 21}, 400, "logprobs: Input should be less than or equal to 20"),
        ({"presence_penalty": 2.5}, 400, "presence_penalty=2.5"),
        ({"repetition_penalty": 0}, 400, "repetition_penalty=0"),
        ({"min_p": 1.5}, 400, "min_p=1.5"),
        ({"mirostat": 2}, 400, "mirostat is not served here"),
        ({"use_beam_search": True}, 400, "use_beam_search is not"),
        ({"speculation": 4}, 400, "speculation is not served here"),
        ({"response_format": {"type": "regex"}}, 400, "response_format of type"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format of type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "what"}}}},
            400,
            "schema is not",
        ),
        ({"temperature": -1}, 400, "temperature: Input should be greater than or equal to 0"),
        ({"top_p": -0.1}, 400, "top_p: "),
        ({"seed": -2}, 400, "seed: "),
        ({"max_tokens": 0}, 400, "max_tokens: "),
        ({"max_tokens": "many"}, 400, "max_tokens: Input should be a valid integer"),
        ({"prompt": "a" * 300}, 400, "context holds 200 tokens; the prompt has 300"),
        ({"prompt": ["a"] * 200}, 400, "the limit is"),
        ({"prompt": []}, 400, "no tokens"),
        ({"prompt": ""}, 400, "no tokens"),
        ({"prompt": [256, 257]}, 400, "outside the vocabulary 0..256"),
        ({"prompt": [10**300]}, 400, "outside the vocabulary"),
        ({"prompt": None}, 400, "prompt: "),
        ({"prompt": "\ud800"}, 400, "half of a surrogate pair"),
        ({"stop": [""]}, 400, "stop: "),
        ({"stop": list("abcdefghijklmnopq")}, 400, "stop: List should have at most 16"),
        ({"messages": [{"role": "user", "content": "a"}]}, 400, "messages is not"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_requests(served: Served, change: dict[str, Any], status: int, message: str) -> None:
    got, body = served.ask("POST", "/v1/completions", {**BASE, **change})
    assert got == status and message in body["error"]["message"] and body["error"]["message"].endswith((".", "it out."))
    assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "no messages"),
        ([{"role": "function", "content": "a"}], "messages.0.role: "),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "part 1 of message 1 is of type 'image_url'",
        ),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": None}], "message 2 (user) has no content"),
        (
            [{"role": "user", "content": "a", "audio": None}, {"role": "user", "content": "a", "audio": {"id": "x"}}],
            "audio of message 2",
        ),
        ([{"role": "user", "content": "\ud800"}], "half of a surrogate pair"),
        ([{"role": "assistant", "content": "a"}], ""),
        ([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], ""),
    ],
    ids=str,
)
def test_wrong_chats(served: Served, messages: list[Any], message: str) -> None:
    status, body = served.ask("POST", "/v1/chat/completions", {**CHAT, "messages": messages})
    assert status == (400 if message else 200) and message in str(body)


THINKS = (
    "{% if tools %}{{ tools[0].function.name }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% if thinks | default(true) %}<think>{% endif %}{% endif %}{{ level }}"
)


def test_templates_get_what_a_request_says(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    text = served.worker.scheduler.text
    monkeypatch.setattr(text, "chat", ChatFormat({"default": THINKS}, {"level": ""}))
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    prefilled = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "So"}]}
    for more, prompt in (
        ({}, "<user>a<assistant><think>"),
        ({"chat_template_kwargs": {"thinks": False, "level": 3}}, "<user>a<assistant>3"),
        ({"tools": [tool], "tool_choice": "auto"}, "now<user>a<assistant><think>"),
        ({"add_generation_prompt": False}, "<user>a"),
        (prefilled, "<user>a<assistant>So"),
        ({**prefilled, "continue_final_message": False}, "<user>a<assistant>So<assistant><think>"),
    ):
        status, body = served.ask("POST", "/v1/chat/completions", {**CHAT, **more})
        assert status == 200 and body["usage"]["prompt_tokens"] == len(prompt), (more, body)
    status, body = served.ask("POST", "/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"messages": []}})
    assert status == 400 and "is no argument" in body["error"]["message"]
    for more in ({"tool_choice": "required"}, {"tools": {}}):
        assert served.ask("POST", "/v1/chat/completions", {**CHAT, **more})[0] == 400
    # What follows the opened <think> is reasoning; a model of random weights does not close it.
    got = served.client().chat.completions.create(**CHAT | {"max_tokens": 9}, temperature=0)
    plain = served.client().completions.create(
        model="tiny", prompt="<user>a<assistant><think>", max_tokens=9, temperature=0
    )
    assert (
        got.choices[0].message.reasoning_content == plain.choices[0].text.strip() and not got.choices[0].message.content
    )


@pytest.mark.parametrize("asked, status", [
    ({"dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2}, 200), ({"dry_multiplier": 0.8, "dry_base": 1.75}, 400),
    ({"xtc_threshold": 0.1}, 200), ({"xtc_threshold": 0.1, "xtc_probability": 0.5}, 400),
    ({"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1}, 200), ({"mirostat_mode": 2, "mirostat_tau": 5.0}, 400),
    ({"repeat_last_n": 64}, 200), ({"repeat_last_n": 64, "repeat_penalty": 1.0}, 200), ({"repeat_last_n": 64, "repeat_penalty": 1.1}, 400),
    ({"dynatemp_range": 0, "dynatemp_exponent": 1.5}, 200), ({"dynamic_temperature": True, "dynatemp_low": 0.5}, 400),
    ({"skip_special_tokens": False}, 400), ({"add_special_tokens": False}, 400), ({"do_sample": False}, 400), ({"do_sample": True}, 200),
    ({"do_sample": None}, 200), ({"include_reasoning": False}, 400),
    ({"reasoning_format": "auto"}, 200), ({"reasoning_format": "none"}, 400),
    ({"timings_per_token": True, "return_progress": True, "priority": 3}, 200),
    ({"max_tokens": 2.0, "seed": 1.0, "top_k": 5e0, "n": 1.0, "logprobs": 1.0}, 200),
    ({"max_tokens": 2.5}, 400), ({"max_tokens": True}, 400),
])  # fmt: skip
def test_fields_ask_for_something_or_nothing(served: Served, asked: dict[str, Any], status: int) -> None:
    """Settings of what is off ask for nothing; false asks for something where true is what is always done."""
    assert served.ask("POST", "/v1/completions", {**BASE, **asked})[0] == status


def test_notes_of_messages_pass(served: Served) -> None:
    plain = {"role": "user", "content": "a"}
    noted = {**plain, "id": "a", "cache_control": {"type": "ephemeral"}, "provider_specific_fields": {"refusal": None}}
    assert served.ask("POST", "/v1/chat/completions", {**CHAT, "messages": [noted]})[0] == 200
    status, said = served.ask("POST", "/v1/chat/completions", {**CHAT, "messages": [{**plain, "audio": {"id": "a"}}]})
    assert status == 400 and "audio" in said["error"]["message"]


def test_what_asks_for_nothing_is_taken(served: Served) -> None:
    neutral = {
        "n": 1,
        "frequency_penalty": 0.0,
        "logit_bias": None,
        "repetition_penalty": 1.0,
        "user": "me",
        "top_k": -1,
        "seed": -1,
        "top_p": 0,
        "logprobs": None,
    }
    assert served.ask("POST", "/v1/completions", {**BASE, **neutral})[0] == 200
    assert (
        served.ask("POST", "/v1/chat/completions", {**CHAT, "tools": [], "logprobs": False, "metadata": {}})[0] == 200
    )


def test_other_paths_and_bodies(served: Served) -> None:
    for method, path, body, headers, status, message in (
        ("GET", "/nothing", None, None, 404, "this server has /v1/chat/completions"),
        ("GET", "/v1/completions", None, None, 405, "method not allowed"),
        ("GET", "/v1/models/other", None, None, 404, "no such model"),
        ("POST", "/v1/completions", b"{", None, 400, "the body is not JSON"),
        ("POST", "/v1/completions", b"\xff", None, 400, "the body is not JSON"),
        ("POST", "/v1/completions", b"[" * 40_000, None, 400, "the body is not JSON"),
        ("POST", "/v1/completions", b'{"n": ' + b"9" * 5000 + b"}", None, 400, "the body is not JSON"),
        ("POST", "/v1/completions", b"[]", None, 400, "a JSON list, not an object"),
        ("POST", "/v1/completions", b"{}", {}, 415, "send application/json"),
        ("POST", "/v1/completions", b"x" * 50_001, None, 413, "limit of 50000 bytes"),
        ("POST", "/v1/completions", b"{}", {**JSON, "content-length": "9" * 15}, 413, "limit of 50000 bytes"),
    ):
        got, said = served.ask(method, path, body, headers)
        assert got == status and message in said["error"]["message"], (path, said)
    assert served.ask("GET", "/health") == (200, {"status": "ok", "running": 0, "waiting": 0})


def test_bodies_that_come_slowly_or_in_chunks(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(parts: Iterator[bytes]) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
        connection.request("POST", "/v1/completions", parts, JSON, encode_chunked=True)
        response = connection.getresponse()
        return response.status, json.loads(response.read()).get("error", {}).get("message", "")

    whole = json.dumps(BASE).encode()
    assert ask(iter([whole[:7], whole[7:]])) == (200, "")
    assert ask(b"x" * 10_000 for _ in range(6)) == (
        413,
        "the body is longer than the limit of 50000 bytes. Shorten the prompt.",
    )
    begun = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", served.port), 5)) for _ in range(22)]
        for client in slow:  # twice as many as have a place
            client.sendall(begun)
        assert b" 429 " in slow[0].recv(1000).split(b"\r\n")[0]
        assert [served.ask("POST", "/v1/completions", BASE)[0] for _ in range(3)] == [200] * 3
    monkeypatch.setattr("still_export.serving.app.BODY_S", 0.1)
    with socket.create_connection(("127.0.0.1", served.port)) as slow:
        slow.sendall(begun)
        assert b" 408 " in slow.recv(1000).split(b"\r\n")[0]


def test_more_requests_than_could_be_answered_are_not_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole bodies that wait for the tokenizer."""
    go = threading.Event()
    encode = served.worker.scheduler.text.encode
    monkeypatch.setattr(served.worker.scheduler.text, "encode", lambda *given: go.wait(20) and encode(*given))
    answers: list[int] = []
    clients = [
        threading.Thread(target=lambda: answers.append(served.ask("POST", "/v1/completions", BASE)[0]))
        for _ in range(13)
    ]
    for client in clients:
        client.start()
    wait(lambda: answers == [429, 429])
    go.set()
    for client in clients:
        client.join()
    assert sorted(answers) == [200] * 11 + [429] * 2


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["tiny", 10**80]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(
    "model prompt messages max_tokens max_completion_tokens temperature top_p top_k seed stop stream stream_options n tools "
    "logprobs echo user role content".split()
)
bodies = (
    st.binary(max_size=40)
    | values.map(lambda v: json.dumps(v).encode())
    | st.dictionaries(fields, values, max_size=5).map(lambda v: json.dumps({**BASE, **v}).encode())
    | st.dictionaries(fields, values, max_size=5).map(lambda v: json.dumps({**CHAT, **v}).encode())
    | st.dictionaries(st.sampled_from(["role", "content", "name"]), values, max_size=3).map(
        lambda v: json.dumps({**CHAT, "messages": [v]}).encode()
    )
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(bodies, st.sampled_from(["/v1/completions", "/v1/chat/completions"]))
def test_malformed_bodies_are_a_clients_error(served: Served, body: bytes, path: str) -> None:
    status, said = served.ask("POST", path, body)
    assert status == 200 or (400 <= status < 500 and said["error"]["message"]), (body, said)


def test_clients_that_leave_free_their_rows(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed or not, while it is read, answered, or waits."""
    scheduler = served.worker.scheduler
    feed = scheduler.model.feed

    calls: list[int] = []

    def slowly(*arguments: Any) -> np.ndarray:
        calls.append(1)
        time.sleep(0.01)
        return feed(*arguments)

    before = metric(served, 'still_requests_ended_total{ended="cancelled"}')
    connections = []
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.model, "feed", slowly)
        for i in range(9):
            connection = http.client.HTTPConnection("127.0.0.1", served.port)
            asked = {"model": "tiny", "prompt": "x" * 100, "max_tokens": 100, "temperature": 0, "stream": bool(i % 2)}
            connection.request("POST", "/v1/completions", json.dumps(asked), JSON)
            connections.append(connection)
        wait(lambda: (scheduler.running, scheduler.queued) == (3, 6))
        read = len(calls)
        for connection in connections:
            connection.close()
        wait(lambda: scheduler.idle)
    assert len(calls) - read < 150, "answers to the end take 300 rounds"
    wait(lambda: metric(served, 'still_requests_ended_total{ended="cancelled"}') - before == 9)
    assert served.client().completions.create(model="tiny", prompt="a", max_tokens=3).usage.completion_tokens <= 3


def wait(until: Callable[[], bool]) -> None:
    for _ in range(500):
        if until():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come true within 10 s")


def metric(served: Served, name: str) -> float:
    text = served.ask("GET", "/metrics")[1]
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def test_metrics(served: Served) -> None:
    before = metric(served, "still_generated_tokens_total")
    count = (
        served.client()
        .completions.create(model="tiny", prompt="a", max_tokens=9, temperature=0)
        .usage.completion_tokens
    )
    assert metric(served, "still_generated_tokens_total") - before == count
    for name in (
        "still_first_token_seconds_count",
        "still_token_seconds_count",
        "still_state_bytes",
        "process_resident",
    ):
        assert metric(served, name) > 0, name
    assert metric(served, "still_requests_running") == 0


def test_the_key_and_the_queue(byte_package: Path) -> None:
    with serve(byte_package, Settings("tiny", f"{KEY}\n"), rows=1, waiting=1) as guarded:
        with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
            guarded.client("wrong").models.list()
        assert guarded.ask("GET", "/v1/models", headers={})[0] == 401
        assert guarded.ask("POST", "/v1/completions", BASE)[0] == 401
        assert guarded.ask("GET", "/health")[0] == guarded.ask("GET", "/metrics")[0] == 200
        headers = {**JSON, "authorization": b"Bearer " + KEY.encode()}
        assert guarded.ask("POST", "/v1/completions", BASE, headers)[0] == 200
        long = {**BASE, "prompt": "x" * 20, "max_tokens": 180, "temperature": 0}
        with ThreadPoolExecutor(6) as pool:
            got = list(pool.map(lambda _: guarded.ask("POST", "/v1/completions", long, headers), range(6)))
        assert {status for status, _ in got} == {200, 429}
        refused = next(body for status, body in got if status == 429)
        assert refused["error"]["code"] == "rate_limit_exceeded" and "Ask again later." in refused["error"]["message"]


def test_a_model_that_fails_is_said(byte_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(byte_package, Settings("tiny"), rows=1) as served:
        with monkeypatch.context() as patch:
            patch.setattr(served.worker.scheduler.model, "feed", lambda *_: np.zeros(0)[1])
            status, body = served.ask("POST", "/v1/completions", BASE)
            assert status == 500 and body["error"]["type"] == "server_error"
            assert served.ask("GET", "/health")[0] == 503
            said = served.ask("POST", "/v1/completions", {**BASE, "stream": True})[1]
            assert '"error"' in said and "[DONE]" not in said
        assert served.ask("POST", "/v1/completions", BASE)[0] == 200 and served.ask("GET", "/health")[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP"])
def test_the_verb_and_its_end(byte_package: Path, number: str) -> None:
    """What runs is finished, what waits is refused, the exit code is 0."""
    command = [sys.executable, "-m", "still_export.cli.main", "serve", byte_package, "--port", "0", "--rows", "1"]
    environment = {**os.environ, "STILL_API_KEY": "k"}
    heard = getattr(signal, number)
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(heard, signal.SIG_DFL),
    ) as process:  # under nohup tests hear no SIGHUP, and their children neither
        assert process.stderr is not None
        line = next(line for line in process.stderr if "tiny on http://127.0.0.1:" in line)
        assert "1 rows of 200 tokens" in line
        port = int(line.split("127.0.0.1:")[1].split("/")[0])
        assert process.stderr.readline() == f"chat in a browser: http://127.0.0.1:{port}/\n"
        curl = [word.replace("$STILL_API_KEY", "k") for word in shlex.split(process.stderr.readline())]
        if shutil.which("curl"):
            answer = subprocess.run([*curl, "--silent"], capture_output=True, text=True, check=True).stdout
            assert json.loads(answer)["object"] == "chat.completion"
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0)
        asked = {"model": "tiny", "prompt": "x" * 10, "max_tokens": 190, "temperature": 0, "stream": True}
        running = client.completions.create(**asked)
        next(iter(running))
        waiting = client.completions.create(**asked)
        process.send_signal(heard)
        rest = list(running)
        assert rest[-1].choices[0].finish_reason in ("length", "stop")
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(waiting)
        with pytest.raises(openai.APIError):
            client.models.list()
        assert process.wait(30) == 0 and process.stderr.read().endswith("stopped\n")


@pytest.mark.slow
def test_what_cannot_be_served(byte_package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as sock:
        taken = sock.getsockname()[1]
        for arguments, message in (
            (["--port", taken], "cannot listen on 127.0.0.1"),
            (["--host", "no.such.host.invalid", "--port", 0], "cannot listen on no.such.host.invalid"),
            (["--api-key", " ", "--port", 0], "is empty: give a key"),
            (["--max-context", 1000, "--port", 0], "exceed this package's capacity of 200"),
            (["--runtime", "trt", "--port", 0], "does not run with --runtime trt"),
        ):
            assert call("serve", byte_package, *arguments) == 2 and message in capsys.readouterr().err
    assert call("serve", tmp_path) == 2 and "manifest" in capsys.readouterr().err
