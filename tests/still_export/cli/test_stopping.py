"""Ctrl-C in a training."""

from __future__ import annotations

import os
import signal

import pytest

from still_export.cli.errors import INTERRUPTS, stopping_behind_steps


class Stop(BaseException):
    pass


@pytest.mark.parametrize("number", INTERRUPTS)
def test_a_signal_stops_behind_its_step(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(each) for each in INTERRUPTS]
    steps: list[int] = []
    report = stopping_behind_steps(lambda stage, done, total, measured: steps.append(done), Stop)
    report("lora", 1, 9, {})
    assert [signal.getsignal(each) for each in INTERRUPTS] != before
    os.kill(os.getpid(), number)
    assert "with a checkpoint" in capsys.readouterr().err
    assert [signal.getsignal(each) for each in INTERRUPTS] == before, "a second one ends at once"
    with pytest.raises(Stop):
        report("lora", 2, 9, {})
    assert steps == [1, 2]


def test_nothing_changes_behind_the_last_step() -> None:
    before = [signal.getsignal(each) for each in INTERRUPTS]
    report = stopping_behind_steps(lambda *_: None, Stop)
    for done in (1, 2):
        report("lora", done, 2, {})
    assert [signal.getsignal(each) for each in INTERRUPTS] == before
