"""States that are kept by their tokens: the longest is found, what it holds is its own, the bound holds, the disk loses nothing."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import still_export
from still_export.errors import ConfigError
from still_export.runtime.conversation import Conversation
from still_export.runtime.feeding import Feeding
from still_export.runtime.prefix_folder import PrefixFolder, open_prefixes
from still_export.runtime.prefixes import PrefixCache
from still_export.runtime.sampling import Sampling
from still_export.runtime.snapshot import Snapshot
from still_graphs.states import State, StateTable
from tests.still_export.serving.conftest import byte_package

__all__ = ["byte_package"]

GROWTH = {"dimension": "rows", "axis": 2, "rows": 1, "per": 1, "lag": 0, "fixed": False}
TABLE = StateTable(
    [
        State("sum.0", 0, "x", ("batch", 4), "float32", True),
        State("key.0", 0, "x", ("batch", 2, "rows", 3), "float32", True, GROWTH),
    ],
    1000,
    True,
)
Tokens = tuple[int, ...]
texts = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)


def state(tokens: Tokens) -> dict[str, np.ndarray]:
    """What a model would hold behind `tokens`: one tensor changes as a whole, one grows."""
    seed = hashlib.sha256(bytes(tokens)).digest()[:4]
    row = np.asarray(tokens, np.float32)[None, None, :, None] + np.arange(3, dtype=np.float32)
    return {"sum.0": np.frombuffer(seed, np.uint8)[None].astype(np.float32), "key.0": np.repeat(row, 2, axis=1)}


def same(cache: PrefixCache, kept: Any, tokens: Tokens) -> None:
    assert (kept.tokens, kept.length) == (len(tokens), len(tokens))
    for name, array in state(tokens).items():
        np.testing.assert_array_equal(cache.state(kept)[name], array)


def alike(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def held(cache: PrefixCache) -> int:
    """Bytes of the tensors that the cache really refers to."""
    kept = [parts for node in cache._with_state for parts in (node.parts or {}).values()]
    return sum({id(part): part.nbytes for parts in kept for part in parts}.values())


@settings(deadline=None, derandomize=True)
@given(st.lists(texts, max_size=30), st.lists(texts, max_size=10))
def test_the_longest_prefix_is_found(kept: list[Tokens], asked: list[Tokens]) -> None:
    cache = PrefixCache(TABLE, 1 << 20)
    for tokens in kept:
        cache.keep(tokens, state(tokens), len(tokens))
    assert cache.states == len(set(kept)) and cache.bytes == held(cache)
    for tokens in [*asked, *kept]:
        best = max((k for k in kept if len(k) < len(tokens) and tokens[: len(k)] == k), key=len, default=None)
        found = cache.find(tokens)
        assert (found is None) == (best is None)
        if best is not None:
            same(cache, found, best)
        assert cache.known(tokens) == max((alike(k, tokens) for k in kept), default=0)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), texts), max_size=60), st.integers(200, 1200))
def test_the_bound_holds_and_what_is_found_is_whole(moves: list[tuple[bool, Tokens]], bound: int) -> None:
    cache = PrefixCache(TABLE, bound)
    for keeps, tokens in moves:
        if keeps:
            cache.keep(tokens, state(tokens), len(tokens))
            fits = sum(array.nbytes for array in state(tokens).values()) <= bound
            found = cache.find((*tokens, 0))
            assert (found is not None and found.tokens == len(tokens)) or not fits, "the newest stays"
        found = cache.find(tokens)
        if found is not None:
            same(cache, found, tokens[: found.tokens])
        assert cache.bytes == held(cache) <= bound
        assert all(node.parts or node.children for node in nodes(cache) if node.parent), "leaves that hold nothing"


def nodes(cache: PrefixCache) -> list[Any]:
    found = [cache._root]
    for node in found:
        found += node.children.values()
        assert all(child.parent is node and child.edge[0] == first for first, child in node.children.items())
    return found


def test_what_costs_most_to_read_again_stays() -> None:
    long, short = (1,) * 40, (2, 2)
    cache = PrefixCache(TABLE, sum(a.nbytes for t in (long, short, (3,) * 30) for a in state(t).values()) - 1)
    for tokens in (long, short, (3,) * 30):
        cache.keep(tokens, state(tokens), len(tokens))
    assert cache.find((*short, 0)) is None and cache.find((*long, 0)) is not None


def test_a_longer_prefix_shares_what_did_not_change() -> None:
    cache = PrefixCache(TABLE, 1 << 20)
    tokens = (1,) * 100
    cache.keep(tokens, state(tokens), 100)
    before = cache.bytes
    cache.keep((*tokens, 2), state((*tokens, 2)), 101)
    assert cache.bytes - before == 4 * 4 + 2 * 3 * 4


@pytest.mark.parametrize("size", ["", "2 apples", "-1", "1e9", "2 gib"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="give bytes, or as 512MiB"):
        open_prefixes(model(), size)


def test_a_cache_larger_than_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is larger than this machine's"):
        open_prefixes(model(), "1000000GiB")
    with pytest.raises(ConfigError, match="has 0 bytes"):
        open_prefixes(model(), 0, tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written"):
        open_prefixes(model(), "1MiB", tmp_path / "file")
    cache = open_prefixes(model(), "1.5MiB")
    assert cache is not None and cache.most_bytes == 3 << 19


def model() -> Any:
    """What a digest asks of a runner."""
    return SimpleNamespace(manifest={"files": {}}, table=TABLE, adapter="", feeding=Feeding())


def cached(folder: Path, package: str = "p", most: int = 1 << 20) -> PrefixCache:
    return PrefixCache(TABLE, most, PrefixFolder(folder, package, most))


def test_prefixes_outlive_the_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = cached(tmp_path)
    for tokens in ((1, 2, 3), (1, 2, 4, 5)):
        cache.keep(tokens, state(tokens), len(tokens), lasting=True)
    cache.keep((1, 2), state((1, 2)), 2)
    cache.close()
    again = cached(tmp_path)
    assert again.states == 0
    same(again, again.find((1, 2, 4, 5, 6)), (1, 2, 4, 5))
    same(again, again.find((1, 2, 3, 6)), (1, 2, 3))
    assert again.find((1, 2, 7)) is None
    foreign = cached(tmp_path, "another")
    assert foreign.find((1, 2, 3, 6)) is None
    assert len(list(tmp_path.iterdir())) == 2 and not capsys.readouterr().err


def test_a_damaged_file_is_refused_and_the_shorter_prefix_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = cached(tmp_path)
    for tokens in ((1, 2), (1, 2, 3)):
        cache.keep(tokens, state(tokens), len(tokens), lasting=True)
    cache.close()
    assert cache.folder is not None
    path = cache.folder._path(np.asarray((1, 2, 3), np.int32))  # type: ignore[attr-defined]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    again = cached(tmp_path)
    same(again, again.find((1, 2, 3, 4)), (1, 2))
    assert "is damaged: its content has another SHA-256" in capsys.readouterr().err
    path.write_bytes(whole[:50])
    again = cached(tmp_path)
    same(again, again.find((1, 2, 3, 4)), (1, 2))
    assert "is no saved state" in capsys.readouterr().err


def test_the_folder_has_a_bound(tmp_path: Path) -> None:
    cache = cached(tmp_path, most=6000)
    for i in range(20):
        cache.keep((i, 1), state((i, 1)), 2, lasting=True)
    cache.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 6000
    again = cached(tmp_path)
    same(again, again.find((19, 1, 2)), (19, 1))


def test_a_clock_set_back_evicts_no_new_state(tmp_path: Path) -> None:
    """As on a board without a battery, which begins in 1970."""
    cache = cached(tmp_path, most=6000)
    for i in range(4):
        cache.keep((i, 1), state((i, 1)), 2, lasting=True)
    cache.close()
    for file in tmp_path.iterdir():
        os.utime(file, (1 << 32, 1 << 32))
    cache = cached(tmp_path, most=6000)
    cache.find((1, 1, 2))
    for i in range(10, 20):
        cache.keep((i, 1), state((i, 1)), 2, lasting=True)
    cache.close()
    again = cached(tmp_path)
    same(again, again.find((19, 1, 2)), (19, 1))
    assert again.find((0, 1, 2)) is None


def test_two_processes_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What one evicts while the other looks is no error."""
    caches = [cached(tmp_path, most=6000) for _ in range(2)]
    for i in range(60):
        for number, cache in enumerate(caches):
            cache.keep((i % 7, number), state((i % 7, number)), 2, lasting=True)
            cache.clear()
        cached(tmp_path).find((i % 7, 0, 1))
    for cache in caches:
        cache.close()
    assert capsys.readouterr().err == ""
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["ort", "torch"])
def test_no_turn_is_read_twice(byte_package: Path, runtime: str) -> None:
    pytest.importorskip("onnxruntime")
    model = still_export.load(byte_package, runtime=runtime, threads=1)
    runner, fed = model.runner, list[int]()
    feed = runner.feed
    runner.feed = lambda ids, *rest: fed.append(ids.shape[1]) or feed(ids, *rest)  # type: ignore[method-assign, func-returns-value]
    cache = PrefixCache(runner.table, 1 << 30)

    def talk(prefixes: PrefixCache | None) -> Conversation:
        return Conversation(runner, model.text, 8, Sampling(), prefixes=prefixes)

    talked, said = talk(cache), []
    for message in ("Hello.", "Who is it?", "Why?"):
        said.append(talked.ask(message, None).tokens)
    talked.back(2)
    fed.clear()
    answer = talked.ask("Where?", None)
    first = len(talked._prompt([], "Hello."))
    assert answer.cached_tokens >= first, "the prompt of the first turn"
    assert sum(fed) == answer.prompt_tokens - answer.cached_tokens + 7
    plain = talk(None)
    assert [plain.ask(m, None).tokens for m in ("Hello.", "Where?")] == [said[0], answer.tokens]
    plain.back(1)
    assert plain.ask("Where?", None).tokens == answer.tokens
    again = talk(cache)
    assert again.ask("Hello.", None).tokens == said[0] and again.ask("Who is it?", None).cached_tokens > 0


@pytest.mark.slow
def test_calls_read_what_is_new(byte_package: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    plain = still_export.load(byte_package, threads=1)
    model = still_export.load(byte_package, threads=1, prefix_cache="100MiB", prefix_dir=tmp_path)
    messages = [{"role": "user", "content": "Who is there?"}]
    first = model.generate(messages, max_tokens=8)
    assert first.tokens == plain.generate(messages, max_tokens=8).tokens and first.cached_tokens == 0
    messages += [{"role": "assistant", "content": "Nobody."}, {"role": "user", "content": "Why?"}]
    second = model.generate(messages, max_tokens=8)
    assert second.tokens == plain.generate(messages, max_tokens=8).tokens
    assert second.cached_tokens == first.prompt_tokens and second.prompt_tokens > first.prompt_tokens
    stopped = model.generate(messages, stream=True, max_tokens=8)
    next(stopped)
    assert model.generate(messages, max_tokens=8).tokens == second.tokens, "an answer that was given up leaves nothing"
    # Behind what was read, which has its own states.
    document = model.read("The ship left at dawn.", chat=True)
    plain.restore(document)
    for _ in range(2):
        told = model.generate([{"role": "user", "content": " When?"}], max_tokens=8)
        assert told.tokens == plain.generate([{"role": "user", "content": " When?"}], max_tokens=8).tokens
    model.restore(None)
    assert model.generate(messages, max_tokens=8).tokens == second.tokens
    assert model.prefixes is not None and model.snapshot().length == model.runner.length[0]
    model.prefixes.close()
    later = still_export.load(byte_package, threads=1, prefix_cache="100MiB", prefix_dir=tmp_path)
    found = later.generate(messages, max_tokens=8)
    assert found.tokens == second.tokens and found.cached_tokens > 0


WRITES = """
import sys, time
from pathlib import Path
from still_export.runtime import snapshot
from tests.still_export.runtime.test_prefixes import cached, state

whole, count = snapshot._write, []

def slow(file, arrays, metadata):  # the fourth file comes to its half
    whole(file, arrays, metadata)
    count.append(file)
    if len(count) == 4:
        file.truncate(400)
        print("half", flush=True)
        time.sleep(60)

snapshot._write = slow
cache = cached(Path(sys.argv[1]))
for i in range(4):
    cache.keep((i, 1, 1), state((i, 1, 1)), 3, lasting=True)
cache.close()
"""


def test_a_kill_while_writing_loses_nothing_else(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"half\n"
        cached(tmp_path)
        assert len(list(tmp_path.iterdir())) == 4  # what a living process writes stays
        os.kill(process.pid, signal.SIGKILL)
    assert len(list(tmp_path.iterdir())) == 4
    cache = cached(tmp_path)
    for i in range(3):
        same(cache, cache.find((i, 1, 1, 5)), (i, 1, 1))
    assert cache.find((3, 1, 1, 5)) is None and all(Snapshot.load(file) for file in tmp_path.iterdir())
