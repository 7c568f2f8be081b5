"""Answers in a file: written as they come, each once, further prompts only as far as there is room."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from still_export.errors import PackageError
from still_export.package.calls import Arrays
from still_export.package.folder import Package
from still_export.proof import recorded
from still_export.proof.cases import EMPTY, Case, Follow
from still_export.proof.recorded import ATTEMPTS, RecordedCases, record_cases

PACKAGE = Package(Path("package"), {"portable": "of these weights", "files": {}})


class Drawn:
    """Two cases, the second of which has a near tie whatever its prompt."""

    count, follows = 2, False

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def begin(self, number: int) -> Sequence[Arrays]:
        return ()

    def draw(self, numbers: Sequence[int], follow: Follow = EMPTY) -> list[Case]:
        return [self.case(number) for number in numbers]

    def case(self, number: int) -> Case:
        state = self.random.standard_normal((1, 2, 9, 5)).astype(np.float32)
        zeros = np.zeros((1, 2, 1000, 5), np.float32)
        logits = {"logits": self.random.standard_normal((1, 1, 11)).astype(np.float32)}
        feeds = [{"past_key.0": zeros}, {"past_key.0": state}]
        expected = [{**logits, "present_key.0": state}, {"logits": logits["logits"] + 1, "present_key.0": state}]
        leads = {0: np.full((1, 2, 1), 0.5 if number else 7.0)}
        errors = [{"logits": np.full((2, 1, 1), 1e-3, np.float32)} for _ in feeds]
        return Case(f"case {number}", feeds, expected, leads, own=errors, own_mean={"logits": 1e-3}, own_top1=(1, 1))


def test_answers_are_read_as_they_were_drawn(tmp_path: Path) -> None:
    path = tmp_path / "calls.npz"
    record_cases(Drawn(), PACKAGE, path)
    again, read = Drawn(), RecordedCases(path, PACKAGE)
    first = again.draw([0, 1])
    rounds = [read.draw([0, 1]), [first[0], *read.draw([1])], [first[0], *read.draw([1])]]
    for found, drawn in zip(rounds, (first, [first[0], *again.draw([1])], [first[0], *again.draw([1])]), strict=True):
        for ours, right in zip(found, drawn, strict=True):
            for name in ("feeds", "expected", "own"):
                for a, b in zip(getattr(ours, name), getattr(right, name), strict=True):
                    assert a.keys() == b.keys()
                    for key, x in b.items():
                        np.testing.assert_array_equal(a[key], x)
            assert ours.own_mean == right.own_mean and ours.name == right.name
    entries = zipfile.ZipFile(path).infolist()
    stored = [e for e in entries if e.compress_type == zipfile.ZIP_STORED]
    # Of each of 1 + ATTEMPTS prompts a state and two logits; leads of two kinds and errors once for all.
    assert len(stored) == 3 * (1 + ATTEMPTS) + 3
    assert sum(e.compress_size for e in entries if e not in stored) < 3000, "zeros take no room"


def test_no_further_prompts_where_the_first_fill_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST_BYTES", 100)
    drawn = Drawn()
    record_cases(drawn, PACKAGE, tmp_path / "calls.npz")
    read = RecordedCases(tmp_path / "calls.npz", PACKAGE)
    (one,), (same,) = read.draw([1]), read.draw([1])
    np.testing.assert_array_equal(one.expected[0]["logits"], same.expected[0]["logits"])


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"own_mean": {"logits": 1e3}}, "was changed after it was recorded"),
        ({"own_top1": [1, 2]}, "was changed after it was recorded"),
        ({}, ""),
    ],
)
def test_what_is_edited_by_hand_is_refused(changed: dict, words: str, tmp_path: Path) -> None:
    """Bounds follow from the errors of PyTorch's own run: whoever widens them widens what passes."""
    path = tmp_path / "calls.npz"
    record_cases(Drawn(), PACKAGE, path)
    with np.load(path) as held:
        arrays = dict(held)
    head = json.loads(arrays["head"].tobytes())
    head["cases"][0][0] |= changed
    np.savez(path, **{**arrays, "head": np.frombuffer(json.dumps(head).encode(), np.uint8)})
    if not words:
        assert RecordedCases(path, PACKAGE).count == 2
        return
    with pytest.raises(PackageError, match=words):
        RecordedCases(path, PACKAGE)
