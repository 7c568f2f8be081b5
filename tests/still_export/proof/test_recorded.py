"""Answers in a file: written as they come, each once."""

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from still_export.errors import PackageError
from still_export.package.folder import Package
from still_export.proof.answers import EMPTY, DecisionsByCase, Progress, Question, silent
from still_export.proof.cases import Case
from still_export.proof.recorded import RecordedCases, record_cases

PACKAGE = Package(Path("package"), {"portable": "of these weights", "files": {}})


class Drawn:
    """Two cases."""

    count, uses_decisions = 2, False
    progress: Progress = staticmethod(silent)

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def begin(self, number: int) -> Question:
        return Question(())

    def draw(self, numbers: Sequence[int], decisions: DecisionsByCase = EMPTY) -> list[Case]:
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
    first, read = Drawn().draw([0, 1]), RecordedCases(path, PACKAGE)
    for found in (read.draw([0, 1]), read.draw([0, 1])):
        for ours, right in zip(found, first, strict=True):
            for name in ("feeds", "expected", "own"):
                for a, b in zip(getattr(ours, name), getattr(right, name), strict=True):
                    assert a.keys() == b.keys()
                    for key, x in b.items():
                        np.testing.assert_array_equal(a[key], x)
            assert ours.own_mean == right.own_mean and ours.name == right.name
    entries = zipfile.ZipFile(path).infolist()
    stored = [e for e in entries if e.compress_type == zipfile.ZIP_STORED]
    # Of each a state and two logits; leads of two kinds and errors once for all.
    assert len(stored) == 3 * 2 + 3
    assert sum(e.compress_size for e in entries if e not in stored) < 3000, "zeros take no room"


def test_what_a_subject_is_asked_has_no_states_but_the_first(tmp_path: Path) -> None:
    record_cases(Drawn(), PACKAGE, tmp_path / "calls.npz")
    question = RecordedCases(tmp_path / "calls.npz", PACKAGE).begin(1)
    assert [list(feed) for feed in question.feeds] == [["past_key.0"], []] and not question.steps


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
    head["cases"][0] |= changed
    np.savez(path, **{**arrays, "head": np.frombuffer(json.dumps(head).encode(), np.uint8)})
    if not words:
        assert RecordedCases(path, PACKAGE).count == 2
        return
    with pytest.raises(PackageError, match=words):
        RecordedCases(path, PACKAGE)
