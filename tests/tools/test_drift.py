"""What tools.benchmarks.drift measures: nothing where both sides are float64, more with more tokens, least where chunks are added."""

from __future__ import annotations

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
