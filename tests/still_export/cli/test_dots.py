"""What verbs print to a log file while they work: nothing is silent for long, and each line is whole."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable

import pytest

from still_export.cli import dots
from still_export.cli.errors import complain
from still_export.cli.output import Output


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dots, "TICK_S", 0.02)


def wait() -> None:
    time.sleep(0.2)


@pytest.mark.usefixtures("quick")
def test_a_long_step_is_named_with_dots(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output()
    with out.steps() as step:
        step("reading")
        wait()
        out.log("a line")
        step("writing")
        wait()
    lines = capsys.readouterr().err.splitlines()
    named = [line for line in lines if line != "a line"]
    assert lines.count("a line") == 1
    assert all(line.startswith(("reading ..", "writing ..")) and line.endswith(" 0 s") for line in named)
    assert {line.split()[0] for line in named} == {"reading", "writing"}


@pytest.mark.usefixtures("quick")
def test_every_kind_of_progress_has_dots(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output()
    with out.waiting("opening"):
        wait()
    with out.bar("measuring", 2) as advance:
        advance("one")
        wait()
    with out.phases() as phase:
        wait()
        phase("PyTorch", 1, 4)
        wait()
    with out.training() as bar:
        wait()
        bar("transfer", 1, 2, {"loss": 1.0})
        wait()
    with out.reading(10_000) as read:
        wait()
        read(10_000, 10_000)
        said = len(capsys.readouterr().err.splitlines())
        wait()  # the answer is being written
        assert capsys.readouterr().err == ""
    assert said == 7


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("say", [
    lambda: complain("DiskFull", "no room"), lambda: print("no room", file=sys.stderr), lambda: sys.stderr.writelines(["no room\n"]),
    lambda: warnings.warn("no room", stacklevel=1), lambda: print("no room", file=sys.stderr, end=""), lambda: Output().say("no room"),
])  # fmt: skip
def test_whatever_is_said_meanwhile_gets_its_own_line(
    say: Callable[[], None], capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    warnings.simplefilter("always")
    warnings.showwarning = lambda text, *_: print(text, file=sys.stderr)
    with Output().training() as bar:
        bar("transfer", 1, 9, {"loss": 1.0})
        wait()
        say()
        wait()
        bar("transfer", 2, 9, {"loss": 1.0})
    lines = capsys.readouterr().err.splitlines()
    assert any(line.endswith("no room") and "left" not in line for line in lines), lines
    assert not isinstance(sys.stderr, dots._OwnLines)


@pytest.mark.usefixtures("quick")
def test_phases_and_stages_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Output().phases() as phase:
        phase("reading", 0, 2)
        phase("PyTorch", 1, 4)
        wait()
        phase("PyTorch", 4, 4)
    lines = capsys.readouterr().err.splitlines()
    assert (
        lines[0] == "reading: 0 of 2" and lines[1].startswith("PyTorch: 1 of 4 ..") and lines[2:] == ["PyTorch: 4 of 4"]
    )
    with Output().training() as bar:
        bar("transfer", 2, 2, {"loss": 1.0})
    assert capsys.readouterr().err == "transfer 2/2  loss 1  0 s left\n"


def test_quick_steps_and_quiet_verbs_print_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Output().steps() as step:
        step("reading")
        step("writing")
    monkeypatch.setattr(dots, "TICK_S", 0.02)
    with Output(quiet=True).steps() as step:
        step("reading")
        wait()
    assert capsys.readouterr().err == ""
