"""The programs that docs/reference gives to readers, as they stand there, and against this project's runner."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from still_export.cli.main import main
from still_export.runtime.ort import OrtModel
from still_export.runtime.sampling import Sampling
from tests.docs.pages import ROOT, blocks
from tests.docs.stand_ins import make_stand_ins
from tests.still_export.conftest import Exporter, export_tiny
from tests.still_export.tiny import MIXED

pytestmark = pytest.mark.slow  # each exports a model

__all__ = ["export_tiny"]

PAGE = ROOT / "docs/reference/own-program.md"


@pytest.mark.parametrize(
    "still", [{}, {"layer_types": MIXED}, {"overflow": "fold_oldest", "capacity_tokens": 40}], ids=str
)
def test_programs_answer_as_the_runner(
    still: dict[str, object],
    export_tiny: Exporter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = export_tiny(**still).path  # type: ignore[arg-type]
    (tmp_path / "DIR").symlink_to(package)
    monkeypatch.chdir(tmp_path)
    programs = blocks(PAGE, ("python",))
    assert len(programs) == 2
    names: dict[str, object] = {}
    for program in programs:
        exec("\n".join(program.lines), names)
    answer, equal = capsys.readouterr().out.splitlines()
    model = OrtModel(package, threads=1)
    model.start()
    assert ast.literal_eval(answer) == list(model.generate([5, 6, 7, 8], 20, Sampling()))
    assert equal == "True"


def test_the_guides_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_stand_ins(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["MODEL", "--to", "onnx", "-o", "DIR", "-q"])
    programs = blocks(ROOT / "docs/guide/first-model.md", ("python",))
    assert len(programs) == 2
    for program in programs:
        exec("\n".join(program.lines), {})
    assert "tokens/s" in capsys.readouterr().out and Path("letter.safetensors").is_file()
