"""Faults of a runner: what it feeds, at which positions, and which logits it gives."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.faults.registry import Random, as_bfloat16, fault, one, two
from tests.faults.states import CALLS

Feed = Callable[[np.ndarray, np.ndarray], np.ndarray]
Change = Callable[[Random, Any, Feed, np.ndarray, np.ndarray], np.ndarray | None]


def instead(kind: str, once: bool = False) -> Callable[[Change], Change]:
    """A fault of what a call is fed or gives, in every call or once after a random one.

    The change is told the runner, its right `feed`, tokens [B, T] and their counts [B]; None: it has nothing to do in this call.
    """

    def register(change: Change) -> Change:
        def plant(random: Random, runner: Any) -> None:
            feed, left = runner.feed, [int(random.integers(CALLS)) if once else 0]

            def right(ids: np.ndarray, new: np.ndarray) -> np.ndarray:
                return np.asarray(feed(ids, new))

            def faulty(ids: np.ndarray, new: np.ndarray | None = None, first: int = 0) -> np.ndarray:
                counts = np.full(len(ids), ids.shape[1], np.int64) if new is None else np.asarray(new, np.int64)
                left[0] -= 1
                found = change(random, runner, right, ids, counts) if left[0] < 0 and first == 0 else None
                if found is None:
                    return np.asarray(feed(ids, new, first))
                left[0] = 1 << 30 if once else 0
                return found

            runner.feed = faulty

        fault("runner", kind)(plant)
        return change

    return register


def off_by_one(runner: Any, feed: Feed, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
    length = runner.length.copy()
    runner.length = length + 1
    logits = feed(ids, counts)
    runner.length = length + counts
    return logits


@instead("positions off by one")
@instead("positions off by one, once", once=True)
def _(random: Random, runner: Any, feed: Feed, ids: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    return off_by_one(runner, feed, ids, counts) if runner.length.min() > 0 else None


@instead("positions off by one after a promotion")
def _(random: Random, runner: Any, feed: Feed, ids: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    chunk = max(2, runner.table.period)
    promoted = ids.shape[1] == 1 and runner.length.min() > chunk and (runner.length % chunk == 1).any()
    return off_by_one(runner, feed, ids, counts) if promoted else None


@instead("positions off by one after a piece")
def _(random: Random, runner: Any, feed: Feed, ids: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    return off_by_one(runner, feed, ids, counts) if ids.shape[1] > 1 and runner.length.min() > 0 else None


@instead("one sequence's positions off by one", once=True)
def _(random: Random, runner: Any, feed: Feed, ids: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    length = runner.length.copy()
    if len(ids) < 2 or not length[0]:
        return None
    runner.length = length + (np.arange(len(ids)) == 0)
    logits = feed(ids, counts)
    runner.length = length + counts
    return logits


@instead("a token that is another", once=True)
def _(random: Random, runner: Any, feed: Feed, ids: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    place = one(random, np.flatnonzero(counts).tolist())
    if place is None:
        return None
    changed = ids.copy()
    number = int(random.integers(counts[place]))
    changed[place, number] = (changed[place, number] + 1) % runner.manifest["model"]["vocab_size"]
    return feed(changed, counts)


@instead("the last token of a prompt fed twice", once=True)
def _(random: Random, runner: Any, feed: Feed, ids: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    if ids.shape[1] < 2:
        return None
    changed = ids.copy()
    changed[:, -2] = changed[:, -1]
    return feed(changed, counts)


@instead("two tokens of a prompt exchanged", once=True)
def _(random: Random, runner: Any, feed: Feed, ids: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    if ids.shape[1] < 2:
        return None
    changed, (a, b) = ids.copy(), two(random, ids.shape[1])
    changed[:, [a, b]] = changed[:, [b, a]]
    return feed(changed, counts)


@instead("the token of the sequence beside", once=True)
def _(random: Random, runner: Any, feed: Feed, ids: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    if len(ids) < 2:
        return None
    a, b = two(random, len(ids))
    changed = ids.copy()
    changed[a] = ids[b]
    return feed(changed, counts)


@instead("padding that counts")
def _(random: Random, runner: Any, feed: Feed, ids: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    if not (counts < ids.shape[1]).any():
        return None
    length = runner.length.copy()
    logits = feed(ids, np.minimum(counts + 1, ids.shape[1]))
    runner.length = length + counts
    return logits


@instead("the last token of a prompt left out", once=True)
def _(random: Random, runner: Any, feed: Feed, ids: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    if ids.shape[1] < 2 or counts.min() < 2:
        return None
    length = runner.length.copy()
    logits = feed(ids, counts - 1)
    runner.length = length + counts
    return logits


@instead("a step taken twice", once=True)
def _(random: Random, runner: Any, feed: Feed, ids: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    if ids.shape[1] > 1 or runner.length.min() == 0:
        return None
    length = runner.length.copy()
    feed(ids, counts)
    runner.length = length
    return feed(ids, counts)


def logits(kind: str, change: Callable[[Random, np.ndarray], np.ndarray], once: bool = False) -> None:
    """A fault of logits [B, T, V]."""

    @instead(kind, once)
    def _(random: Random, runner: Any, feed: Feed, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        return change(random, feed(ids, counts).copy())


def any_off(random: Random, found: np.ndarray) -> np.ndarray:
    found[0, -1, int(random.integers(found.shape[-1]))] += found.std() / 100
    return found


def first_off(_: Random, found: np.ndarray) -> np.ndarray:
    found[..., 0] += found.std() / 1000
    return found


for factor in (1.02, 1.005, 1.0002):
    logits(f"logits times {factor}", lambda _, found, factor=factor: found * np.float32(factor))
logits("logits times 1.02 in one call", lambda _, found: found * np.float32(1.02), once=True)
logits("a logit off by a hundredth of their spread", any_off, once=True)
logits("a token's logit off by a thousandth of their spread", first_off)
logits("two tokens' logits exchanged", lambda _, found: found[..., [1, 0, *range(2, found.shape[-1])]])
logits("logits of the sequence beside", lambda _, found: np.roll(found, 1, 0))
logits("logits rounded to half precision", lambda _, found: found.astype(np.float16).astype(np.float32))
logits("logits rounded to bfloat16", lambda _, found: as_bfloat16(found))
logits("logits all higher by a tenth", lambda _, found: found + np.float32(0.1))


@fault("runner", "logits of the call before")
def _(random: Random, runner: Any) -> None:
    feed, kept = runner.feed, [None]

    def faulty(ids: np.ndarray, new: np.ndarray | None = None, first: int = 0) -> np.ndarray:
        found = np.asarray(feed(ids, new, first)).copy()
        stale = kept[0] if kept[0] is not None and kept[0].shape == found.shape else found
        kept[0] = found
        return stale

    runner.feed = faulty
