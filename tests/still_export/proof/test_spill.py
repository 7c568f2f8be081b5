"""What was taken comes back as it was, where it was."""

import math
import os
import tracemalloc
from collections.abc import Callable

import numpy as np

from still_export.proof.cases import Case
from still_export.proof.judge import Judged
from still_export.proof.spill import SpillFile, joined, room_for, rooms_for


def test_arrays_come_back() -> None:
    rng, zeros = np.random.default_rng(0), np.zeros((3, 4))
    wide, half = rng.standard_normal((2, 3, 5)), rng.standard_normal((1, 7)).astype(np.float16)
    first, second = {"a.0": wide, "b.0": half, "a.1": wide[0], "logits": half}, {"c.0": wide, "d.0": zeros}
    calls, right = [first, second], [dict(first), dict(second)]
    spill = SpillFile()
    spill.take(calls, ".0")
    assert first.keys() == {"a.1", "logits"} and second.keys() == {"d.0"}
    spill.take(calls, ".1")
    spill.restore()
    for found, expected in zip(calls, right, strict=True):
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            np.testing.assert_array_equal(found[name], x)
            assert found[name].dtype == x.dtype
    assert second["d.0"] is zeros and first["logits"] is half
    first["a.0"][0] = 0  # nobody else's
    np.testing.assert_array_equal(second["c.0"][1:], wide[1:])
    SpillFile().restore()


def traced_peak(work: Callable[[], object]) -> int:
    """Bytes of memory that is the process's own, at most, while `work` runs."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_large_arrays_lie_in_files() -> None:
    shape = (2, 60, 100_000)
    size = 4 * math.prod(shape)
    assert traced_peak(lambda: room_for(shape, np.float32)) < size / 100
    found = room_for(shape, np.float32)
    assert found.shape == shape and found.dtype == np.float32 and not found.any()
    found[1, 59] = 7
    assert found[1, 59, 99_999] == 7 and not found[1, 58].any()
    whole = [joined([found, found[:, :3]], axis=1)]
    np.testing.assert_array_equal(whole[0], np.concatenate([found, found[:, :3]], axis=1))
    assert traced_peak(lambda: whole.append(joined([found, found], axis=1))) < size / 100
    small = room_for((3, 4), np.float16)
    assert small.dtype == np.float16 and not small.any()
    opened = len(os.listdir("/proc/self/fd"))
    rooms = rooms_for([shape, (0, 5), (3, 100_000)], np.float32)
    assert len(os.listdir("/proc/self/fd")) <= opened + 1
    assert [room.shape for room in rooms] == [shape, (0, 5), (3, 100_000)]
    rooms[0][:], rooms[2][:] = 1, 2
    assert rooms[0].min() == rooms[0].max() == 1 and rooms[2].min() == rooms[2].max() == 2


def test_comparing_logits_takes_no_copies_of_them() -> None:
    """Padding, margins, errors: of calls whose vocabulary is large each copy is a gigabyte."""
    rng = np.random.default_rng(0)
    counts = np.array([300, 171])
    right, found = (room_for((2, 300, 50_000), np.float32) for _ in range(2))
    for row in range(2):
        right[row] = rng.standard_normal((300, 50_000), np.float32)
    found[:] = right
    found[:, ::2, 7] += 1.5
    feed = {"new_tokens": counts}

    def compare() -> Judged:
        case = Case("one", [feed], [{"logits": right}], own_mean={"logits": 0.0})
        case.own = [{"logits": np.full((2, 2, 300), 1e-3, np.float32)}]
        return Judged.of(case, case.pairs([{"logits": found}]))

    assert traced_peak(compare) < right.nbytes / 2
    logits = compare().found.logits[0]
    assert logits.real.sum(1).tolist() == counts.tolist()
    np.testing.assert_allclose(logits.spread[0], right[0].std(-1), rtol=1e-5)
