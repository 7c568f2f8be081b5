"""still-export cache: nothing of the user's own is listed or removed."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from still_export.package.staging import ALIVE
from tests.still_export.verbs import call


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with one of each; STILL_CACHE names a folder in which other files lie."""
    for name, folder in (("STILL_CACHE", "mixed"), ("XDG_STATE_HOME", "state"), ("XDG_CONFIG_HOME", "config")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    package = tmp_path / "mixed/packages/lfm-0123456789abcdef"
    for name, content in {
        "mixed/packages/lfm-0123456789abcdef/manifest.json": json.dumps({"config": {"model": "/of/lfm.gguf"}}),
        "mixed/packages/lfm-0123456789abcdef/model.onnx.data": "x" * 300_000,
        "mixed/packages/.lfm-0123456789abcdef.0123456789ab.staged/model.onnx": "killed",
        f"mixed/packages/.other-0123456789abcdef.0123456789ab.staged/{ALIVE}": "",
        "mixed/packages/notes/mine.txt": "mine",
        "mixed/kernels/x86_64-0123456789abcdef/libstill_onnxruntime.so": "library",
        "mixed/linearize/0123456789abcdef0123456789abcdef.json": "{}",
        "mixed/linearize/notes.json": "mine",
        "mixed/onnxruntime-include/onnxruntime_c_api.h": "header",
        "mixed/kernels.txt": "mine",
        "state/still-export/chat-history": "+hello",
        "config/still-export/trusted-native": "ab libstill_onnxruntime.so\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert package.is_dir()
    return tmp_path


def files(home: Path) -> set[str]:
    return {path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()}


def test_what_is_kept_is_listed_and_removed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (home / "mixed/packages/.other-0123456789abcdef.0123456789ab.staged" / ALIVE).open("r+") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)  # another export is running
        assert call("cache", "--json") == 0
        listed = json.loads(capsys.readouterr().out)["kept"]
        assert [row["kind"] for row in listed] == [
            "packages",
            "packages",
            "kernels",
            "linearize",
            "headers",
            "history",
            "trust",
        ]
        assert listed[1]["made_of"] == "/of/lfm.gguf" and listed[1]["size_bytes"] > 300_000
        assert call("cache") == 0
        said = capsys.readouterr().out
        assert "0.3 MB" in said and "of /of/lfm.gguf" in said and str(home / "state/still-export/chat-history") in said
        before = files(home)
        assert call("cache", "--remove", "lfm-0123456789abcdef", "--remove", "history") == 0
        gone = before - files(home)
        assert {name.split("/")[-1] for name in gone} == {"manifest.json", "model.onnx.data", "chat-history"}
        assert call("cache", "--remove", "all") == 0
        mine = {"mixed/packages/notes/mine.txt", "mixed/linearize/notes.json", "mixed/kernels.txt"}
        assert files(home) == {*mine, f"mixed/packages/.other-0123456789abcdef.0123456789ab.staged/{ALIVE}"}
        assert not (home / "state/still-export").exists() and not (home / "mixed/kernels").exists()
        capsys.readouterr()
        assert call("cache", "--remove", "all", "--json") == 0 and json.loads(capsys.readouterr().out) == {
            "removed": []
        }


def test_an_unknown_name_removes_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(home)
    for name in ("package", "x86_64-0123456789abcdef", "../config", ""):
        assert call("cache", "--remove", "kernels", "--remove", name) == 2
        assert "known: all, packages" in capsys.readouterr().err
    assert files(home) == before
