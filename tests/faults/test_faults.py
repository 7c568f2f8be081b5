"""A sample of the planted faults: verify finds them, and nothing where nothing is planted. All of them: `python -m tests.faults`."""

from pathlib import Path

import pytest

from tests.faults import native
from tests.faults.campaign import Broken, Drawn, outcomes, package_of, widened
from tests.faults.registry import FAULTS

SAMPLE = {
    "float32": (
        "a row of o_proj times 1.1",
        "a matrix times 1.005",
        "a linear state times 1.005",
        "a salient slot of another token",
        "logits times 1.02 in one call",
        "positions off by one after a promotion",
        "padding that counts",
        "two sequences' states exchanged",
        "the residual in the wrong precision",
        "a GreaterOrEqual for a Greater in a body",
    ),
    "float16": (
        "a matrix times 1.02",
        "a linear state times 1.02 once",
        "a salient slot of a neighbouring head",
        "a ring read before it is written",
        "logits times 1.02",
        "a token that is another",
        "two layers' states exchanged as outputs",
    ),
}


def test_faults_are_many_and_named_once() -> None:
    names = [each.name for each in FAULTS]
    assert len(set(names)) == len(names) >= 60
    assert {each.where for each in FAULTS} == {"weights", "graph", "kernels", "native", "states", "runner"}


def test_lines_of_kernels_that_faults_change_are_there() -> None:
    """Each under its own number, in sources that know the switch."""
    sources = native.patched()
    text = "".join(sources.values())
    assert all(f"still_fault == {number})" in text for number, *_ in native.EDITS)
    assert all("common/fault.h" in sources[path] for path in sources if "still_fault ==" in sources[path])


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLE)
def test_planted_faults_are_found(kind: str, tmp_path: Path) -> None:
    package = widened(package_of(tmp_path, "hybrid", kind))
    subject = Broken(package, "float32", Drawn(package, 0), tmp_path)
    assert subject.clean().passed
    wanted = [each for each in FAULTS if each.name in SAMPLE[kind]]
    found = list(outcomes(subject, [0], wanted))
    assert len(found) >= 0.8 * len(wanted), "most of them change something"
    assert not [each for each in found if not each.found or each.refused]


@pytest.mark.slow
def test_a_fault_that_verify_should_not_see_is_not_found(tmp_path: Path) -> None:
    """The count of what is found can be less than all: a harness that always says found would be worth nothing."""
    package = package_of(tmp_path, "hybrid", "float16")
    subject = Broken(package, "torch", Drawn(package, 0), tmp_path)
    subject.clean()
    (outcome,) = outcomes(subject, [0], [each for each in FAULTS if each.name == "logits times 1.0002"])
    assert not outcome.found and not outcome.refused and 0 < outcome.moved < 1e-2
