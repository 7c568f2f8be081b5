"""Streams of another server that pass through; what the page is told of a model."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from still_export.runtime.reasoning import Reasoning
from still_export.runtime.sampling import Sampling
from still_export.serving.app import _sampling_settings
from still_export.serving.replies import Answered, Reply, line, to_the_end
from still_export.serving.requests import Event
from still_export.serving.wire import Choice, ParsedRequest

httpx = pytest.importorskip("httpx2")  # what openai speaks through
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


def read(lines: list[str]) -> tuple[str, str]:
    """The text that OpenAI's client hands out of these lines, and the error that it raises."""
    answer = httpx.Response(200, headers={"content-type": "text/event-stream"}, content="".join(lines).encode())
    transport = httpx.MockTransport(lambda _: answer)
    client = openai.OpenAI(
        base_url="http://server/v1", api_key="x", http_client=httpx.Client(transport=transport), max_retries=0
    )
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


def test_reasoning_is_apart_from_content() -> None:
    said = "<think>\nhm </b>\n</think>\n\nYes."
    for cut in range(1, len(said)):
        thought = content = ""
        reply = Reply(asked(opened=False), "m")
        for piece, ended in ((said[:cut], None), (said[cut:], "end")):
            delta = reply.piece(0, Event(piece, ended))["choices"][0]["delta"]
            thought, content = thought + delta.get("reasoning_content", ""), content + delta.get("content", "")
        assert (thought, content) == ("hm </b>", "Yes."), cut
    for text, opened, wanted in (
        (said.removeprefix("<think>"), True, ("hm </b>", "Yes.")),
        ("cut off </thi", True, ("cut off </thi", "")),
        ("Yes </think>.", False, (None, "Yes </think>.")),
        ("<thi", False, (None, "<thi")),
    ):
        message = Reply(asked(opened), "m").whole([Answered(text, "end")])["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == wanted


def asked(opened: bool) -> ParsedRequest:
    """A request whose prompt has opened reasoning, or not."""
    return ParsedRequest(True, [Choice([1], 9, Sampling(), 0, Reasoning(("<think>", "</think>"), opened))])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ('{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": 2}', 4),
        ('{"do_sample": true, "temperature": NaN, "top_k": "many"}', 1),
        ("[1]", 0),
        ("{", 0),
    ],
)
def test_the_page_starts_with_the_publishers_settings(tmp_path: Path, said: str, expected: int) -> None:
    (tmp_path / "generation_config.json").write_text(said)
    entry = {"sha256": hashlib.sha256(said.encode()).hexdigest(), "size_bytes": len(said)}
    model: Any = SimpleNamespace(folder=tmp_path, manifest={"files": {"generation_config.json": entry}})
    assert len(_sampling_settings(model)) == expected
    (tmp_path / "generation_config.json").write_text(said.replace("t", "T"))
    assert _sampling_settings(model) == {} or "t" not in said
