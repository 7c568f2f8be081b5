"""still-export doctor: what it finds follows what is there, and says what to do about the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from still_export import doctor
from still_export.cli.main import main
from still_export.package.cache import CACHE_VARIABLE

HERE = {
    "onnx": "1.23",
    "onnx-ir": "1",
    "onnxscript": "0.7",
    "onnxruntime": "1.31",
    "tokenizers": "0.23",
    "polygraphy": "0.5",
    "nlohmann-json": "3.12",
}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Installed packages by name, for the test to change."""
    there = dict(HERE)
    monkeypatch.setattr(doctor, "version", there.get)
    monkeypatch.setattr(doctor, "find_gpu", lambda: None)
    return there


def finding(words: str) -> doctor.Finding:
    found = [f for f in doctor.examine() if words in f.what]
    assert len(found) == 1, words
    return found[0]


def test_packages_decide(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding("Runtime on the CPU").able
    del versions["onnxscript"]
    broken = finding("Runtime on the CPU")
    assert not broken.able and "onnxscript" in broken.detail and "still-export[onnx]" in broken.todo
    assert not finding("linearize").able
    versions.update(peft="1", accelerate="1", pyyaml="1")
    assert "CPU alone" in finding("linearize").detail
    monkeypatch.setattr(doctor, "find_gpu", lambda: "NVIDIA H200")
    assert "H200" in finding("linearize").detail
    assert "pip install onnxruntime-gpu" in finding("--provider cuda").todo
    versions["onnxruntime-gpu"] = "1.31"
    assert finding("--provider cuda").able
    assert not finding("TensorRT engines").able
    versions["tensorrt"] = "10.13"
    assert finding("TensorRT engines").able


def test_kernels_are_there_or_can_be_built(
    versions: dict[str, str], kernels_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cmake", "c++"):
        (tools / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tools))
    found = finding("--native")
    assert not found.able and "still-export kernels build" in found.todo
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "cmake" in finding("--native").detail and "apt-get" in finding("--native").todo
    monkeypatch.setattr(doctor.platform, "system", lambda: "Darwin")
    assert "Darwin" in finding("--native").detail
    monkeypatch.undo()
    monkeypatch.setenv(CACHE_VARIABLE, str(kernels_cache))
    assert finding("--native").able


def test_what_cannot_be_done_says_what_to_do(versions: dict[str, str]) -> None:
    versions.clear()
    for found in doctor.examine():
        assert not found.able, found
        assert found.todo or "no NVIDIA GPU" in found.detail or found.able, found


def test_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["doctor"])
    said = capsys.readouterr().out
    assert "Python" in said and "ONNX Runtime on the CPU" in said
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["doctor", "--json"])
    assert {"machine", "findings"} == json.loads(capsys.readouterr().out).keys()
