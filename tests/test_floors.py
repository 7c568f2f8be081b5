"""The floors of still_export: who may import whom. That no imports form a cycle, in any package, is in test_imports.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.floors import FLOORS, ROOT, Arrow, Sources, write_package


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(ROOT / "still_export")


def test_every_room_has_a_floor(sources: Sources) -> None:
    rooms = [room for floor in FLOORS for room in floor]
    assert sorted(rooms) == sorted(set(map(sources.room, sources.files)))


def test_every_file_imports_lower_floors_alone(sources: Sources) -> None:
    assert not sources.up()


def test_export_run_and_measure_do_not_know_each_other(sources: Sources) -> None:
    assert not sources.never()


def test_what_is_never_imported_is_found(tmp_path: Path) -> None:
    """The test above can fail, though floors allow both."""
    texts = {
        "runtime/base.py": "",
        "models/load.py": "",
        "targets/lower.py": "from still_export.runtime import base",
        "serving/app.py": "def f():\n    from still_export.models.load import x",
        "serving/vllm/model.py": "import still_export.models.load",
    }
    write_package(tmp_path / "still_export", texts)
    assert Sources(tmp_path / "still_export").never() == [
        Arrow("still_export.serving.app", "still_export.models.load"),
        Arrow("still_export.targets.lower", "still_export.runtime.base"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "import still_export.cli.main",
        "def f():\n    from still_export.cli import main",
        "from importlib import import_module\nimport_module('still_export.cli.main')",
        "WHERE = 'still_export.cli.main:app'",
    ],
)
def test_an_import_is_found_however_it_is_written(line: str, tmp_path: Path) -> None:
    """These tests can fail."""
    for name, text in {"errors.py": line, "cli/main.py": "from still_export import errors"}.items():
        (tmp_path / "still_export" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "still_export" / name).write_text(text)
    found = Sources(tmp_path / "still_export")
    assert found.up() == [Arrow("still_export.errors", "still_export.cli.main")]
    assert found.cycles() == [["still_export.cli.main", "still_export.errors"]]
    assert found.cycles(rooms=True) == [["cli", "errors"]]


def test_types_alone_may_come_from_above(tmp_path: Path) -> None:
    (tmp_path / "still_export" / "cli").mkdir(parents=True)
    (tmp_path / "still_export" / "cli" / "main.py").write_text("")
    typing = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from still_export.cli import main\n"
    (tmp_path / "still_export" / "errors.py").write_text(typing)
    assert not Sources(tmp_path / "still_export").arrows
