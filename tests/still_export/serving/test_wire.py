"""Streams of another server that pass through."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from still_export.serving.wire import line, to_the_end

openai = pytest.importorskip("openai")


async def events(breaks: bool) -> AsyncIterator[str]:
    for text in ("a", "b"):
        yield line({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
    if breaks:
        raise ConnectionError("the replica's process ended")
    yield "data: [DONE]\n\n"


def passed(breaks: bool) -> list[str]:
    async def collect() -> list[str]:
        return [event async for event in to_the_end(events(breaks))]

    return asyncio.run(collect())


class Handler(BaseHTTPRequestHandler):
    """Answers each request with what its server was given."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(self.server.body)  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None: ...


def read(lines: list[str]) -> tuple[str, str]:
    """The text that OpenAI's client hands out, and the error that it raises."""
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.body = "".join(lines).encode()  # type: ignore[attr-defined]
        threading.Thread(target=server.handle_request, daemon=True).start()
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="x", max_retries=0)
        text = ""
        try:
            for chunk in client.completions.create(model="m", prompt="p", stream=True):
                text += chunk.choices[0].text
        except openai.APIError as error:
            return text, str(error)
    return text, ""


def test_a_stream_that_breaks_off_ends_with_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    text, error = read(passed(True))
    assert text == "ab" and "broke off" in error
    assert "the replica's process ended" in capsys.readouterr().err


def test_a_whole_stream_passes_as_it_is() -> None:
    whole = passed(False)
    assert whole[-1] == "data: [DONE]\n\n" and len(whole) == 3
    assert read(whole) == ("ab", "")
