"""Ctrl-C, and a full disk, in a training."""

from __future__ import annotations

import errno
import os
import signal
import struct
from pathlib import Path

import pytest

from still_export.cli.errors import INTERRUPTS, stopping_behind_steps
from still_export.cli.main import main
from still_export.linearization.run_folder import RunFolder


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


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "kind, end, go_on", [("Interrupted", Stop(), "Go on"), ("DiskFull", FULL, "Go on, when there is room")]
)
def test_an_end_while_it_measures_says_how_to_go_on(
    kind: str,
    end: BaseException,
    go_on: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where a run was begun; before, nothing is there to go on from."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "base/model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (tmp_path / "corpus.txt").write_text("words")
    words = ["linearize", str(tmp_path / "base"), "--text", str(tmp_path / "corpus.txt"), "-o", str(tmp_path / "made")]
    monkeypatch.setattr("sys.argv", ["still-export", *words, "--force"])
    for begun in (False, True):

        def run(recipe: object, output: Path, begun: bool = begun, **_: object) -> None:
            if begun:
                RunFolder(output).begin({}, False)
            raise end

        monkeypatch.setattr("still_export.linearization.linearize.linearize", run)
        with pytest.raises(SystemExit if begun else (Stop, SystemExit)) as left:
            main(words)
        said = " ".join(capsys.readouterr().err.split())
        assert (f"a checkpoint is kept. {go_on}: still-export linearize" in said) == begun
    assert left.value.code == 2 and kind in said and said.endswith("--resume") and "--force" not in said
