"""What tools.benchmarks.drift measures: nothing where both sides are float64, more with more tokens, least where chunks are added."""

import argparse

import numpy as np
import pytest

from tools.benchmarks import drift
from tools.benchmarks.common import Findings


def measured(tokens: int) -> list[dict[str, float]]:
    findings = Findings()
    drift.of_state(argparse.Namespace(tokens=tokens, seed=0), findings)
    return findings.rows


def test_float32_drifts_and_float64_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured(8192)
    assert [row["position"] for row in rows] == [1024, 2048, 4096, 8192]
    for row in rows:
        assert row["chunk_sum"] < row["step_sum"] < 1e-5 and 1e-8 < row["chunk_read"] < 1e-6
    assert rows[-1]["step_sum"] > rows[0]["step_sum"]
    monkeypatch.setattr(np, "float32", np.float64)
    assert max(value for name, value in measured(1024)[0].items() if name != "position") < 1e-13


def test_a_rest_keeps_a_narrow_state_from_drifting() -> None:
    """Rounded alone it is lost once a chunk is less than its last place; with what rounding took it is off by one rounding."""
    findings = Findings()
    drift.of_narrow(argparse.Namespace(tokens=16384, seed=0, mean=1.0), findings)
    first, last = findings.rows[0], findings.rows[-1]
    assert last["bfloat16"] > 30 * first["bfloat16"] and last["by chance"] > 3 * first["by chance"]
    assert max(last["with bfloat16"], last["with int8"]) < 1.2 * first["with int8"] < 6e-4


def test_roundings_to_bfloat16() -> None:
    """By hand: the nearest, ties to the even one; by chance one of both neighbours, in the mean the number itself."""
    draw = np.random.default_rng(0)
    given = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-7, -1 - 2**-9], np.float32)
    assert drift.nearest(given, draw).tolist() == [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -1.0]
    found = drift.by_chance(np.full(20000, 1 + 2**-9, np.float32), draw)
    assert set(found.tolist()) == {1.0, 1 + 2**-7} and abs(found.mean() - (1 + 2**-9)) < 1e-4
    rest = np.array([2**-9, -(2**-15)], np.float32)
    assert drift.in_steps(rest, np.ones(2, np.float32)).tolist() == rest.tolist()
