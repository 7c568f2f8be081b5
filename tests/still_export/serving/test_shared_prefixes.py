"""Whose states a request continues: one beginning is read once for users of one scope, and nobody learns what another scope wrote."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from still_export.runtime.ort import OrtModel
from still_export.runtime.prefixes import PrefixCache
from still_export.runtime.sampling import Sampling
from still_export.runtime.text import Text
from still_export.serving.app import Settings
from still_export.serving.requests import Event, Request
from still_export.serving.scheduler import Scheduler
from tests.still_export.serving.served import JSON, Served, serve

pytest.importorskip("onnxruntime")
KEYED = {**JSON, "authorization": "Bearer k3y"}


def open_cache(runner: Any) -> PrefixCache:
    return PrefixCache(runner.table, 1 << 28)


def cached(served: Served, ids: list[int], **fields: Any) -> int:
    body = {"model": "tiny", "prompt": ids, "max_tokens": 1, "temperature": 0, **fields}
    status, answer = served.ask("POST", "/v1/completions", body, KEYED)
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def recovered(served: Served, rng: random.Random, ends: int, alice: dict[str, Any], bob: dict[str, Any]) -> bool:
    """Whether Bob finds two digits that Alice wrote by the tokens that he reads. `ends`: tokens of Alice after the form."""
    digits = list(range(100, 105))
    head, tail = [rng.randrange(1, 90) for _ in range(40)], [rng.randrange(110, 120) for _ in range(18)]
    secret = [rng.choice(digits), rng.choice(digits)]
    cached(served, head + secret + tail + [rng.randrange(130, 180) for _ in range(ends)], **alice)
    for guess in itertools.product(digits, repeat=2):
        start = [*head, *guess, *tail]
        cached(served, [*start, *(rng.randrange(180, 210) for _ in range(3))], **bob)
        if cached(served, [*start, *(rng.randrange(210, 240) for _ in range(3))], **bob) >= len(start):
            return [*guess] == secret
    return False


@pytest.mark.slow
def test_nobody_learns_what_another_wrote(byte_package: Path) -> None:
    rng = random.Random(1)
    with serve(byte_package, Settings("tiny", "k3y", 50_000), rows=2, piece=128, cache=open_cache) as served:
        for ends in (0, 30):
            assert not recovered(served, rng, ends, {}, {})
            assert not recovered(served, rng, ends, {"cache_salt": "Alice"}, {})
            assert not recovered(served, rng, ends, {"cache_salt": "Alice"}, {"cache_salt": "Bob"})
            assert not recovered(served, rng, ends, {}, {"prompt_cache_key": "Bob"})
        assert recovered(served, rng, 30, {"cache_salt": "both"}, {"cache_salt": "both"})  # the attack works


def test_a_salt_and_published_documents_are_shared(byte_package: Path) -> None:
    rng = random.Random(2)
    ids = [rng.randrange(1, 200) for _ in range(70)]
    with serve(byte_package, Settings("tiny", "k3y", 50_000), rows=2, piece=16, cache=open_cache) as served:
        assert cached(served, ids) == cached(served, [*ids, 5, 6]) == 0
        assert cached(served, ids, cache_salt="a") == 0 < cached(served, [*ids, 7], prompt_cache_key="a")
        assert cached(served, [*ids, 7], cache_salt="b") == 0
        document = ids[::-1]
        assert served.ask("POST", "/v1/prefixes", {"model": "tiny", "prompt": document}, KEYED)[0] == 200
        assert cached(served, [*document, 9]) == cached(served, [*document, 8], cache_salt="b") == len(document)
        served.ask("POST", "/v1/prefixes", {"model": "tiny", "prompt": ids[5:], "cache_salt": "a"}, KEYED)
        assert (
            cached(served, [*ids[5:], 9], cache_salt="c") < 10
            and cached(served, [*ids[5:], 9], cache_salt="a") == len(ids) - 5
        )


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("gone", [False, True])
def test_a_common_cold_beginning_is_read_once(byte_package: Path, cache: bool, gone: bool) -> None:
    """Four users with the same instructions and own questions, one of whom may leave while he reads for the others."""
    rng = random.Random(3)
    system = [rng.randrange(1, 250) for _ in range(90)]
    asked = [system + [rng.randrange(1, 250) for _ in range(4 + n)] for n in range(3)]
    asked.append([*asked[0], 77, 78])
    model = OrtModel(byte_package, threads=1)
    alone = []
    for prompt in asked:
        model.start()
        alone.append(list(model.generate(prompt, 6, Sampling())))
    for scopes, tokens in (
        (((),) * 4, 90 + sum(len(p) - 90 for p in asked)),
        (((-5,), (), (-7,), None), sum(map(len, asked))),
    ):
        fed = 0
        scheduler = Scheduler(model, Text(model), 4, piece=16, prefixes=open_cache(model) if cache else None)

        def feed(ids: Any, counts: Any, first: int, plain: Any = model.feed) -> Any:
            nonlocal fed
            fed += int(counts.sum())
            return plain(ids, counts, first)

        heard: list[list[Event]] = [[] for _ in asked]
        requests = [
            Request(prompt, 6, Sampling(), heard[n].append, scope=scope)
            for n, (prompt, scope) in enumerate(zip(asked, scopes, strict=True))
        ]
        scheduler.model.feed = feed  # type: ignore[method-assign]
        try:
            for request in requests:
                scheduler.submit(request)
            scheduler.step()
            if gone:
                scheduler.cancel(requests[0])
            while not scheduler.idle:
                scheduler.step()
        finally:
            del scheduler.model.feed
        for request, right in list(zip(requests, alone, strict=True))[1 if gone else 0 :]:
            assert request.tokens == right[: len(request.tokens)] and len(request.tokens) == 6
        answered = 5 * len(asked)  # the first token of an answer comes from the prompt
        if not gone:  # the last prompt goes on with the first one's question
            assert fed == tokens + answered - (len(asked[0]) - 90 if scopes[0] == scopes[3] else 0)
        else:
            assert fed < sum(map(len, asked)) + answered
