"""The programs in examples/: short, and with the answers of this project's runner."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from still_export.export.native import find_onnxruntime_headers
from still_export.export.plugins import PluginBuildError
from still_export.runners.ort import OrtModel
from still_export.runners.sampling import Sampling
from tests.docs.pages import ROOT
from tests.still_export.conftest import Exporter, export_tiny
from tests.still_export.tiny import MIXED

__all__ = ["export_tiny"]

EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.is_file())
LINES = 60


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < LINES


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ program, built against the library that onnxruntime's wheel brings, which is found beside it."""
    import onnxruntime

    compiler = shutil.which("g++")
    try:
        include = find_onnxruntime_headers()
    except PluginBuildError as error:
        pytest.skip(str(error))
    if compiler is None or not (include / "onnxruntime_cxx_api.h").is_file():
        pytest.skip("needs g++ and ONNX Runtime's C++ headers")
    folder = tmp_path_factory.mktemp("greedy")
    (library,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*")
    (folder / "libonnxruntime.so.1").symlink_to(library)
    source, program = ROOT / "examples/onnxruntime_greedy.cpp", folder / "greedy"
    command = [compiler, "-std=c++17", "-Wall", "-Werror", "-isystem", str(include), str(source)]
    command += [str(folder / "libonnxruntime.so.1"), f"-Wl,-rpath,{folder}", "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return program


@pytest.mark.slow
@pytest.mark.parametrize("still", [{}, {"layer_types": MIXED}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_cpp_program_answers_as_the_runner(
    still: dict[str, object], dtype: str, greedy: Path, export_tiny: Exporter
) -> None:
    package = export_tiny("llama", dtype, **still).path  # type: ignore[arg-type]
    command = [str(greedy), str(package / "model.onnx"), "20", "5", "6", "7", "8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    model = OrtModel(package, threads=1)
    model.start()
    assert [int(token) for token in done.stdout.split()] == list(model.generate([5, 6, 7, 8], 20, Sampling()))
