"""Requests that share the rows of one batch say what they say alone, whenever they come and go."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import still_export
from still_export.runtime.ort import OrtModel
from still_export.runtime.prefixes import PrefixCache
from still_export.runtime.sampling import RunError, Sampling
from still_export.runtime.text import Answer, Text
from still_export.serving import rows
from still_export.serving.requests import Event, QueueFullError, Request, StoppingError
from still_export.serving.scheduler import Scheduler
from tests.still_export.serving.conftest import CONTEXT

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.slow
IDS = [int(i) for i in np.random.default_rng(2).integers(0, 256, CONTEXT)]


@pytest.fixture(scope="module")
def shared(byte_package: Path) -> OrtModel:
    return OrtModel(byte_package, threads=1)


@pytest.fixture(scope="module")
def text(shared: OrtModel) -> Text:
    return Text(shared)


@dataclass(frozen=True)
class Case:
    """A request: where its prompt begins and how long it is, how it is answered, the round in which it comes, how long it may stay."""

    begin: int
    length: int
    tokens: int
    seed: int | None = None
    stop: str = ""
    arrives: int = 0
    stays: int | None = None

    @property
    def prompt(self) -> list[int]:
        return IDS[self.begin : self.begin + self.length]

    @property
    def sampling(self) -> Sampling:
        return Sampling() if self.seed is None else Sampling(0.8, 0, 0.95, self.seed)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if self.stop else ()


class Client:
    """Submits a case and keeps what it is told."""

    def __init__(self, case: Case) -> None:
        self.case, self.events = case, list[Event]()
        self.request = Request(case.prompt, case.tokens, case.sampling, self.events.append, case.stops)

    @property
    def told(self) -> tuple[list[int], str, str | None]:
        return self.request.tokens, "".join(e.text for e in self.events), self.events[-1].ended if self.events else None


def answers(package: Path, text: Text) -> Any:
    """What `run` answers to a case: tokens, text, how it ended."""
    model = OrtModel(package, threads=1)

    @functools.cache
    def answer(begin: int, length: int, tokens: int, seed: int | None, stop: str) -> tuple[list[int], str, str]:
        case = Case(begin, length, tokens, seed, stop)
        model.start()
        given = Answer(model, text, case.prompt, tokens, case.sampling, stop=case.stops)
        said = "".join(given)
        return given.tokens, said, given.ended

    return lambda case: answer(case.begin, case.length, case.tokens, case.seed, case.stop)


@pytest.fixture(scope="module")
def alone(byte_package: Path, text: Text) -> Any:
    """The answers of the package without options."""
    return answers(byte_package, text)


def rounds(scheduler: Scheduler, clients: list[Client]) -> Iterator[int]:
    """Rounds until all have ended."""
    number = 0
    while number == 0 or not scheduler.idle or any(c.case.arrives >= number for c in clients):
        for client in clients:
            if client.case.arrives == number:
                scheduler.submit(client.request)
            elif client.case.stays is not None and client.case.arrives + client.case.stays == number:
                scheduler.cancel(client.request)
        scheduler.step()
        yield number
        number += 1
        assert number < 2000


cases = st.builds(
    Case,
    begin=st.integers(0, 60),
    length=st.integers(1, 90),
    tokens=st.integers(1, 40),
    seed=st.none() | st.integers(0, 3),
    stop=st.sampled_from(["", "", "e", "ab", "\ufffd"]),
    arrives=st.integers(0, 30),
    stays=st.none() | st.none() | st.integers(1, 30),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(cases, min_size=1, max_size=8), st.integers(1, 4), st.integers(1, 33))
def test_arrivals_cancels_and_lengths_change_no_answer(
    shared: OrtModel, text: Text, alone: Any, drawn: list[Case], rows: int, piece: int
) -> None:
    scheduler = Scheduler(shared, text, rows, waiting=8, piece=piece)
    clients = [Client(case) for case in drawn]
    for _ in rounds(scheduler, clients):
        pass
    assert scheduler.running == scheduler.queued == 0 and not scheduler.broken
    for client in clients:
        tokens, said, ended = client.told
        wanted_tokens, wanted, wanted_end = alone(client.case)
        assert tokens == wanted_tokens[: len(tokens)]
        if client.case.stays is None or ended is not None:
            assert (tokens, said, ended) == (wanted_tokens, wanted, wanted_end)
        else:
            assert wanted.startswith(said)


@pytest.mark.parametrize("states", [3, 1000])
def test_kept_prefixes_change_no_answer(shared: OrtModel, text: Text, alone: Any, states: int) -> None:
    """Prompts of a few beginnings, whose states come and go, beside each other: every answer is that of its request alone."""
    most_bytes = states * shared.table.size_bytes(1, shared.table.rows(100))
    cache = PrefixCache(shared.table, most_bytes)
    alike = cases.filter(lambda case: case.begin < 4)

    @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(alike, min_size=2, max_size=6), st.integers(1, 3), st.integers(5, 33))
    def check(drawn: list[Case], rows: int, piece: int) -> None:
        scheduler = Scheduler(shared, text, rows, waiting=8, piece=piece, prefixes=cache)
        clients = [Client(case) for case in drawn]
        for _ in rounds(scheduler, clients):
            assert cache.bytes <= most_bytes
        for client in clients:
            if client.case.stays is None:
                assert client.told == alone(client.case)

    check()
    assert 0 < cache.hit_tokens < cache.prompt_tokens


def test_a_turn_reads_what_is_new_alone(shared: OrtModel, text: Text) -> None:
    """Turns of two conversations that share a beginning; the third that parts there finds it."""
    scheduler = Scheduler(shared, text, rows=2, piece=24, prefixes=PrefixCache(shared.table, 1 << 30))

    def asked(prompt: list[int], tokens: int = 6, warm: bool = False) -> Request:
        request = Request(prompt, tokens, Sampling(), lambda _: None, warm=warm)
        scheduler.submit(request)
        while scheduler.step():
            pass
        return request

    first = asked(IDS[:50])
    again = asked([*first.prompt, *first.tokens, 7, 8])
    assert first.cached == 0 and again.cached == 50 + len(first.tokens) - 1
    assert asked(IDS[:50]).cached == 48, "the last multiple of a piece"
    assert asked([*IDS[:45], 1, 2, 3]).cached == 24 and asked([*IDS[:45], 9, 9]).cached == 45, "where prompts part"
    warmed = asked(IDS[60:90], tokens=1, warm=True)
    assert not warmed.tokens and warmed.done and asked(IDS[60:95]).cached == 30
    assert asked(IDS[60:90], tokens=1, warm=True).cached == 24


def test_rows_in_8_bits_are_shared_and_cleared(codes_package: Path) -> None:
    """Codes and scales of a row that a request left are no other's."""
    model = OrtModel(codes_package, threads=1)
    text = Text(model)
    scheduler = Scheduler(model, text, rows=2, waiting=8, piece=7)
    clients = [Client(case) for case in (Case(0, 50, 40), Case(3, 9, 12, stays=6), Case(20, 70, 3, arrives=2))]
    for _ in rounds(scheduler, clients):
        pass
    alone = answers(codes_package, text)
    assert all(client.told == alone(client.case) for client in clients if client.case.stays is None)


def test_the_reference_serves_too(byte_package: Path, alone: Any) -> None:
    """The same on a runtime that calls all rows at once."""
    model = still_export.load(byte_package, runtime="torch")
    scheduler = Scheduler(model.runner, model.text, rows=2, piece=30)
    clients = [Client(Case(0, 50, 9)), Client(Case(9, 33, 9)), Client(Case(4, 20, 4, seed=1))]
    for _ in rounds(scheduler, clients):
        pass
    assert [c.told for c in clients] == [alone(c.case) for c in clients]


def test_a_long_prompt_does_not_stop_the_answers(shared: OrtModel, text: Text) -> None:
    """Each round reads a piece and gives every answer a token; a second prompt takes turns with the first."""
    scheduler = Scheduler(shared, text, rows=3, piece=10)
    first, long, short = (Client(Case(0, n, 60, arrives=a)) for n, a in ((5, 0), (120, 3), (15, 4)))
    grew, begun = [], {}
    for number in rounds(scheduler, [first, long, short]):
        grew.append(len(first.request.tokens))
        for name, client in (("long", long), ("short", short)):
            if client.request.tokens and name not in begun:
                begun[name] = number
    # The round that reads the end of a prompt gives its first two tokens.
    assert grew[:20] == list(range(2, 22)), "one token a round, whatever is read"
    assert begun == {"short": 3 + 4, "long": 3 + 12 + 2 - 1}


def test_what_is_refused(shared: OrtModel, text: Text) -> None:
    scheduler = Scheduler(shared, text, rows=1, waiting=1, context=100)
    for case, message in (
        (Case(0, 0, 4), "no tokens"),
        (Case(0, 60, 41), "context holds 100 tokens; the prompt has 60"),
        (Case(0, 6, 0), "max_tokens=0"),
    ):
        with pytest.raises(RunError, match=message):
            scheduler.submit(Client(case).request)
    for prompt in ([1, 257], [-1], [10**400]):
        with pytest.raises(RunError, match="outside the vocabulary"):
            scheduler.submit(Request(prompt, 4, Sampling(), print))
    with pytest.raises(RunError, match="empty"):
        scheduler.submit(Request([1], 4, Sampling(), print, [""]))
    with pytest.raises(RunError, match="capacity of 200"):
        Scheduler(shared, text, context=300)
    clients = [Client(Case(0, 5, 4)) for _ in range(4)]
    scheduler.submit(clients[0].request)
    scheduler.submit(clients[1].request)  # the row is free, and one may wait
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        scheduler.submit(clients[2].request)
    scheduler.step()
    with pytest.raises(QueueFullError):
        scheduler.submit(clients[2].request)
    scheduler.cancel(clients[1].request)  # its place is free at once
    scheduler.submit(clients[2].request)
    scheduler.stop()
    assert clients[2].told[2] == "refused" and "stopping" in clients[2].events[-1].error
    with pytest.raises(StoppingError):
        scheduler.submit(clients[3].request)
    while scheduler.step():
        pass
    assert clients[0].told[2] == "length" and not clients[1].events


def test_a_call_that_fails_ends_the_requests_in_it(
    shared: OrtModel, text: Text, alone: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = Scheduler(shared, text, rows=3, piece=10)
    good, bad, later = Client(Case(0, 20, 9)), Client(Case(7, 30, 9)), Client(Case(2, 30, 9))
    feed = shared.feed

    def failing(ids: np.ndarray, counts: np.ndarray, first: int) -> np.ndarray:
        if first == 1 and ids.shape[1] == 10:
            raise MemoryError("no room\nat all")
        return feed(ids, counts, first)

    scheduler.submit(good.request)
    scheduler.submit(bad.request)
    monkeypatch.setattr(shared, "feed", failing)
    while bad.told[2] is None:
        scheduler.step()
    assert bad.told[2] == "failed" and scheduler.broken == "no room at all"
    assert "no room at all" in capsys.readouterr().err
    monkeypatch.setattr(shared, "feed", feed)
    scheduler.submit(later.request)
    while scheduler.step():
        pass
    assert good.told == alone(good.case) and later.told == alone(later.case) and not scheduler.broken


@pytest.mark.parametrize("seed", [None, 3])
def test_logits_that_are_no_numbers_end_their_request_alone(
    shared: OrtModel, text: Text, alone: Any, monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    scheduler = Scheduler(shared, text, rows=2)
    good, bad, later = Client(Case(0, 20, 12, seed)), Client(Case(7, 30, 12, seed)), Client(Case(2, 30, 9))
    feed, calls = shared.feed, list[int]()

    def overflowing(ids: np.ndarray, counts: np.ndarray, first: int = 0) -> np.ndarray:
        found = feed(ids, counts, first)
        calls.append(len(ids))
        if len(calls) > 6 and first + len(ids) == 2:  # the second row's
            found[-1] = np.nan
        return found

    monkeypatch.setattr(shared, "feed", overflowing)
    for client in (good, bad):
        scheduler.submit(client.request)
    while scheduler.step():
        pass
    assert bad.told[2] == "failed" and "not finite" in bad.events[-1].error and not scheduler.broken
    assert good.told == alone(good.case)
    monkeypatch.undo()
    scheduler.submit(later.request)
    while scheduler.step():
        pass
    assert later.told == alone(later.case)


def test_what_nobody_foresaw_ends_requests_not_the_thread(
    shared: OrtModel, text: Text, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(shared, text, rows=2)
    clients = [Client(Case(0, 20, 9)), Client(Case(7, 30, 9))]
    for client in clients:
        scheduler.submit(client.request)
    monkeypatch.setattr(Sampling, "choose", lambda *_: 1 // 0)
    while scheduler.step():
        pass
    assert [c.told[2] for c in clients] == ["failed", "failed"]
    monkeypatch.undo()
    again = Client(Case(0, 20, 9))
    scheduler.submit(again.request)
    while scheduler.step():
        pass
    assert again.told == alone(again.case)


def test_an_idle_model_gives_its_memory_back(shared: OrtModel, text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "IDLE_TOKENS", 50)
    scheduler = Scheduler(shared, text, rows=2)
    client = Client(Case(0, 120, 3))
    scheduler.submit(client.request)
    while scheduler.step():
        pass
    assert client.told[2] == "length" and shared.room <= 50
