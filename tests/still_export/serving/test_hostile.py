"""Clients that mean harm, and accidents that look like it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from still_export.runtime.sampling import RunError
from still_export.runtime.stop_texts import MOST_STOP_CHARACTERS, StopTexts
from still_export.serving import app, connection
from still_export.serving.app import Settings
from still_export.serving.connection import Connections, report_once
from tests.still_export.serving.served import Served, serve

BASE = {"model": "tiny", "prompt": "a", "max_tokens": 2}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
HEAD_S = 0.5


@pytest.fixture(scope="module")
def limits() -> Connections:
    limits = Connections(head_s=HEAD_S, write_s=0.5)
    limits.most = 8
    return limits


@pytest.fixture(scope="module")
def served(byte_package: Path, limits: Connections) -> Iterator[Served]:
    hosts = frozenset(("127.0.0.1", "box.lan"))
    with serve(byte_package, Settings("tiny", None, 1_000_000, hosts), rows=2, waiting=4, limits=limits) as served:
        yield served


@pytest.mark.parametrize("host, allowed", [
    ("127.0.0.1:80", True), ("localhost", True), ("LocalHost:8000", True), ("a.localhost.", True), ("[::1]:8000", True),
    ("10.0.0.7", True), ("Box.lan:1", True),
    ("a\\@localhost", False), ("a@localhost", False), ("localhost/a", False), ("localhost#", False),
    ("attacker.example", False), ("localhost.attacker.example:8000", False), ("127.0.0.1.nip.io", False), ("[::1", False),
    ("user@attacker.example", False), ("", False),
])  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/"])
def test_names_of_other_sites_are_refused(served: Served, host: str, allowed: bool, path: str) -> None:
    """A page of attacker.example whose name now is this machine's address (DNS rebinding)."""
    status, said = served.ask("GET", path, headers={"host": host})
    assert status == (200 if allowed else 403)
    assert allowed or "--allowed-host" in said["error"]["message"]


@pytest.mark.parametrize("allowed", [(), ("https://chat.example",), ("*",)])
def test_pages_of_other_origins(byte_package: Path, allowed: tuple[str, ...]) -> None:
    """A browser asks before it sends JSON or a key, and shows a page answers and errors of a server alone that names its origin."""
    names, wanted = ("access-control-allow-origin", "access-control-allow-headers"), "authorization,content-type"
    with serve(byte_package, Settings("tiny", "k3y", origins=allowed), rows=1) as served:
        for origin in ("https://chat.example", "https://other.example"):
            connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
            ask = {"access-control-request-method": "POST", "access-control-request-headers": wanted}
            connection.request("OPTIONS", "/v1/chat/completions", headers={"origin": origin, **ask})
            asked = connection.getresponse()
            asked.read()
            may = origin in allowed or "*" in allowed
            assert (asked.status == 200) == may
            assert not may or {each.strip() for each in asked.headers[names[1]].split(",")} >= set(wanted.split(","))
            for key, status in (("k3y", 200), ("wrong", 401)):
                headers = {"origin": origin, "content-type": "application/json", "authorization": f"Bearer {key}"}
                connection.request("POST", "/v1/completions", json.dumps(BASE), headers)
                answer = connection.getresponse()
                answer.read()
                assert (answer.status, answer.headers[names[0]] in (origin, "*")) == (status, may)
            connection.close()


@pytest.mark.parametrize("body", [
    {**BASE, "\ud800": 1}, {"\udfff": 1}, {**BASE, "stream_options": {"\ud800": 1}}, {**BASE, "user": "\ud800"},
    {**BASE, "model": "\ud800"}, {**BASE, "stop": "\ud800"}, {**BASE, "prompt": "\ud800"},
], ids=ascii)  # fmt: skip
def test_half_a_surrogate_pair_is_no_fault_of_the_server(served: Served, body: dict[str, Any]) -> None:
    status, said = served.ask("POST", "/v1/completions", body)
    assert status in (200, 400, 404), said
    for wrong in ({"role": "\ud800", "content": "a"}, {"role": "user", "content": "a", "\ud800": 1}):
        status, said = served.ask("POST", "/v1/chat/completions", {"model": "tiny", "messages": [wrong]})
        assert status == 400, said


NAN = float("nan")


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "field", [{"user": NAN}, {"chat_template_kwargs": {"a": [float("inf")]}}, {"top_p": -NAN}], ids=str
)
def test_numbers_that_json_has_not_are_refused(served: Served, field: dict[str, Any]) -> None:
    status, said = served.ask("POST", "/v1/chat/completions", {**CHAT, **field})
    assert status == 400 and "not a JSON number" in said["error"]["message"]


@pytest.mark.parametrize("depth", [400, 850, 900, 930, 940, 950, 955, 960, 965, 970, 980])
def test_deep_bodies_are_no_fault_of_the_server(served: Served, depth: int) -> None:
    """Somewhere on the way from the body to the template, each is too deep for one more reader or writer of JSON."""
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 40 * depth}}
    messages = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "a"}]
    values = ({"chat_template_kwargs": {"a": deep(depth)}}, {"tools": [{"a": deep(depth)}]}, {"metadata": deep(depth)})
    for change in (*values, {"messages": [{"role": "user", "content": deep(depth)}]}, {"messages": messages}):
        body = {**CHAT, **change}
        try:
            body = json.dumps(body).encode()
        except RecursionError:
            continue
        status, said = served.ask("POST", "/v1/chat/completions", body)
        assert status in (200, 400), said


def test_half_a_pair_inside_a_calls_arguments(served: Served) -> None:
    """A text of JSON in the JSON, which the model's template gets as an object."""
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "\ud800"})}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    for asked in (messages, [{"role": "user", "content": "a", "name": "\ud800"}]):
        assert served.ask("POST", "/v1/chat/completions", {**CHAT, "messages": asked})[0] in (200, 400)
    tools = [{"type": "function", "function": {"name": "\ud800"}}]
    assert served.ask("POST", "/v1/chat/completions", {**CHAT, "tools": tools})[0] in (200, 400)


def test_a_request_of_two_lengths_ends_the_connection(served: Served) -> None:
    """A proxy that reads one of them would take what follows for another request."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    body = b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    with connect(served, head + body + ONE) as client:
        said = b""
        while part := client.recv(1 << 16):
            said += part
    assert said.count(b"HTTP/1.1 ") == 1 and b"HTTP/1.1 400" in said and b"Send one of them" in said


@pytest.mark.parametrize("head", [
    b"host: localhost\r\nhost: attacker.example", b"host: localhost\r\ncontent-length: 2\r\ncontent-length: 3",
    b"host: localhost\r\ntransfer-encoding: gzip, chunked", b"host: localhost\r\ncontent-length: -1", b"host: localhost\r\n : a",
    b"host: localhost\r\ntransfer-encoding : chunked", b"host: localhost\r\ncontent-length: +2", b"host: " + b"a" * 100_000,
], ids=lambda head: head[-30:].decode())  # fmt: skip
def test_malformed_heads_are_refused(served: Served, head: bytes) -> None:
    with connect(served) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head + b"\r\n\r\n")
        said = client.recv(1 << 16)
    assert said.startswith((b"HTTP/1.1 400", b"HTTP/1.1 403", b"HTTP/1.1 501")), said


@pytest.mark.parametrize("change", [
    {"stop": ["a" * 23_000 + c for c in "bcde"]}, {"prompt": [None] * 150_000}, {"prompt": [[None]] * 100_000}, {"stop": [1] * 150_000},
    {"logit_bias": {str(i): i for i in range(50_000)}}, {"x" * 900_000: 1},
], ids=["stop", "prompt", "prompts", "stops", "biases", "name"])  # fmt: skip
def test_a_large_wrong_body_is_refused_at_once(served: Served, change: dict[str, Any]) -> None:
    took = []
    for _ in range(2):  # garbage of all tests before may be collected in one of them
        begin = time.perf_counter()
        status, said = served.ask("POST", "/v1/completions", {**BASE, **change})
        took.append(time.perf_counter() - begin)
        assert status == 400 and len(said["error"]["message"]) < 1100
    assert min(took) < 1


def test_stop_texts_cost_linear_time() -> None:
    """Texts that agree with what is written up to their last character: each was compared from every beginning, at every token."""
    stops = StopTexts(["a" * (MOST_STOP_CHARACTERS - 1) + end for end in "bcde"])
    begin = time.perf_counter()
    assert sum(len(stops.push("a")) for _ in range(20_000)) == 20_000 - MOST_STOP_CHARACTERS + 1
    assert time.perf_counter() - begin < 2
    assert stops.push("c") == "" and stops.found
    with pytest.raises(RunError, match="1,001 characters"):
        StopTexts(["a" * 1001])


def test_stop_texts_that_overlap_themselves() -> None:
    stops = StopTexts(["aabaaa", "abab"])
    assert [stops.push(c) for c in "xaabaab"] == ["x", "", "", "", "", "", "aab"]
    assert stops.push("aaayz") == "" and stops.found


def connect(served: Served, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", served.port), timeout=10)
    client.sendall(sent)
    return client


def ended(client: socket.socket) -> bool:
    """The server closed the connection."""
    try:
        while client.recv(1 << 20):
            pass
    except ConnectionResetError:
        pass
    return True


ONE = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize("sent", [
    b"", b"GET /hea", b"GET /health HTTP/1.1\r\nhost: local", ONE, ONE + b"GET /health HTTP/1.1\r\nx:",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{",
], ids=["nothing", "half a line", "half a head", "one request", "one and a half", "a refused body"])  # fmt: skip
def test_connections_without_a_request_end(served: Served, limits: Connections, sent: bytes) -> None:
    """Whatever a client goes on to send, a byte at a time: the time is that of the whole head."""
    with connect(served, sent) as client:
        begin, stopped = time.monotonic(), threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while sent[-1:].isalpha() and not stopped.wait(0.05):
                    client.sendall(b"a")

        thread = threading.Thread(target=drip)
        thread.start()
        assert ended(client)
        stopped.set()
        thread.join()
    assert HEAD_S * 0.8 < time.monotonic() - begin < 4 * HEAD_S
    assert not limits.waiting


def test_too_many_connections_close_the_oldest_that_asks_nothing(served: Served) -> None:
    idle = [connect(served, b"GET /") for _ in range(30)]
    begin = time.monotonic()
    assert [served.ask("GET", "/health")[0] for _ in range(3)] == [200] * 3
    assert time.monotonic() - begin < HEAD_S
    assert all(ended(client) for client in idle[:20])
    for client in idle:
        client.close()


def test_answers_that_nobody_reads_are_given_up(served: Served) -> None:
    """The client asks for pages without end and reads none."""
    page = b"GET /page.js HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", served.port))
        client.settimeout(5)
        with pytest.raises(ConnectionError):
            while True:
                client.sendall(page * 100)


def test_a_full_table_of_descriptors_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(report_once())
    for _ in range(512):
        loop.call_exception_handler({"message": "accept", "exception": OSError(errno.EMFILE, "Too many open files")})
    loop.close()
    said = capsys.readouterr().err
    assert said.count("Too many open files") == 1 and "ulimit -n" in said


def test_connections_leave_descriptors_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are accepted at once come on top of the most that there may be."""
    resource = pytest.importorskip("resource")
    others = connection.SPARE_DESCRIPTORS + connection.ROUNDS * connection.ACCEPTED
    for limits, most, raised in (
        ((256, 256), 256 - others, 256),
        ((256, 1024), 1024 - others, 1024),
        ((256, 4096), 1000, 1000 + others),
        ((256, resource.RLIM_INFINITY), 1000, 1000 + others),
        ((4096, 4096), 1000, None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1000, None),
        ((64, 64), 1, 64),
    ):
        asked: list[int] = []
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        monkeypatch.setattr(resource, "setrlimit", lambda _, wanted, asked=asked: asked.append(wanted[0]))
        assert Connections().most == most
        assert asked == ([] if raised is None else [raised])


@pytest.mark.slow
def test_a_burst_of_connections_does_not_stop_the_server(byte_package: Path) -> None:
    """Where descriptors are few: connections were closed for others one by one, so that each second brought 64."""
    serving = [sys.executable, "-m", "still_export.cli.main", "serve", byte_package, "--port", "0", "--name", "tiny"]
    command = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *serving]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if " on http://127.0.0.1:" in line)
        served = Served(int(line.split("127.0.0.1:")[1].split("/")[0]), None, None, None)  # type: ignore[arg-type]
        held = [connect(served, b"GET /he") for _ in range(900)]
        begin = time.monotonic()
        assert served.ask("GET", "/health")[0] == 200
        assert time.monotonic() - begin < 5
        for client in held:
            client.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0 and "Too many open files" not in process.stderr.read()


def test_health_says_busy_when_nothing_moves(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    model = served.worker.scheduler.model
    feed = model.feed

    def stuck(*arguments: Any) -> Any:
        begun.set()
        go.wait(10)
        return feed(*arguments)

    monkeypatch.setattr(model, "feed", stuck)
    monkeypatch.setattr(app, "STALLED_S", 0.2)
    asking = threading.Thread(target=served.ask, args=("POST", "/v1/completions", BASE))
    asking.start()
    begun.wait(10)
    assert served.ask("GET", "/health")[0] == 200
    time.sleep(0.3)
    status, said = served.ask("GET", "/health")
    go.set()
    asking.join()
    assert status == 503 and "busy" in said["error"]["message"]
    assert served.ask("GET", "/health")[0] == 200


def test_a_package_that_is_written_while_it_is_served_ends_the_server(byte_package: Path, tmp_path: Path) -> None:
    package = shutil.copytree(byte_package, tmp_path / "package")
    weights = package / "model.onnx.data"
    with serve(package, Settings("tiny"), rows=1) as served:
        assert served.ask("POST", "/v1/completions", BASE)[0] == 200
        os.utime(weights, ns=(1, 1))
        served.thread.join(20)
        assert not served.thread.is_alive()
        assert "model.onnx.data was changed while it was used" in str(served.worker.failure)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["cut", "written", "exchanged"])
def test_the_verb_ends_with_a_sentence(byte_package: Path, tmp_path: Path, change: str) -> None:
    """Never by SIGBUS; a package whose file is exchanged for another is served on as it was."""
    package = shutil.copytree(byte_package, tmp_path / "package")
    weights = package / "model.onnx.data"
    content = weights.read_bytes()
    command = [sys.executable, "-m", "still_export.cli.main", "serve", package, "--port", "0", "--name", "tiny"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if " on http://127.0.0.1:" in line)
        port = int(line.split("127.0.0.1:")[1].split("/")[0])
        served = Served(port, None, None, None)  # type: ignore[arg-type]
        assert served.ask("POST", "/v1/completions", BASE)[0] == 200
        if change == "cut":
            os.truncate(weights, 0)
        elif change == "written":
            weights.write_bytes(content[::-1])
        else:
            (package / "new").write_bytes(content[::-1])
            os.replace(package / "new", weights)
        with contextlib.suppress(OSError, http.client.HTTPException):
            served.ask("POST", "/v1/completions", BASE)
        if change == "exchanged":
            time.sleep(2.5)
            assert served.ask("POST", "/v1/completions", BASE)[0] == 200
            process.send_signal(signal.SIGTERM)
        code, said = process.wait(30), process.stderr.read()
        assert code == (0 if change == "exchanged" else 2)
        assert change == "exchanged" or "LostPages: " in said or "was changed while it was used" in said
