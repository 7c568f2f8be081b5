"""The programs in examples/, short and with the answers of this project's runner, and those of the guide's first page."""

import ctypes
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from still_export.cli.main import main
from still_export.engines.build import build_engines
from still_export.package.folder import open_package
from still_export.runtime.ort import OrtModel
from still_export.runtime.sampling import Sampling
from still_export.runtime.tensorrt import TrtModel
from still_export.runtime.text import Text
from still_export.targets.lower import lower
from still_export.targets.ort.headers import compiler_flags
from still_export.targets.trt.plugins import PluginBuildError
from tests.docs.pages import ROOT, blocks
from tests.docs.stand_ins import make_stand_ins
from tests.still_export import fake_tensorrt
from tests.still_export.conftest import Exporter, export_tiny
from tests.still_export.fake_cuda import HostLibrary
from tests.still_export.packages import trt_package
from tests.still_export.serving.conftest import exported
from tests.still_export.tiny import MIXED

__all__ = ["export_tiny"]


def shared_library(folder: Path, name: str) -> Path:
    """The library that onnxruntime's wheel brings, under the name that a program looks for."""
    import onnxruntime

    (library,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*")
    (folder / name).symlink_to(library)
    return folder / name


def compiled(command: list[object]) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def build_cpp(folder: Path, source: str = "onnxruntime_greedy.cpp", *words: str) -> list[str]:
    """The command of a C++ program, built with what its first lines and the page say: `still-export kernels flags`."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    try:
        flags = compiler_flags(*([True] if words else []))
    except (PluginBuildError, ModuleNotFoundError) as error:
        pytest.skip(str(error))
    if not (Path(flags[1]) / "onnxruntime_cxx_api.h").is_file():
        pytest.skip("needs ONNX Runtime's C++ headers")
    said = (ROOT / "examples" / source).read_text(encoding="utf-8")
    assert f"examples/{source} $(still-export kernels flags{''.join(' ' + word for word in words)}) -o" in said
    program = folder / "program"
    compiled([compiler, "-std=c++17", "-Wall", "-Werror", ROOT / "examples" / source, *flags, "-o", program])
    return [str(program)]


def build_cs(folder: Path) -> list[str]:
    """The command of the C# program, on Mono; its assembly of ONNX Runtime comes from elsewhere."""
    assembly = os.environ.get("STILL_ONNXRUNTIME_ASSEMBLY", "")
    if not assembly or not shutil.which("mcs") or not shutil.which("mono"):
        pytest.skip("needs mcs, mono, and Microsoft.ML.OnnxRuntime.dll, named by STILL_ONNXRUNTIME_ASSEMBLY")
    shared_library(folder, "libonnxruntime.so")
    (folder / Path(assembly).name).symlink_to(Path(assembly).resolve())
    program = folder / "greedy.exe"
    compiled(["mcs", f"-r:{assembly}", f"-out:{program}", ROOT / "examples/onnxruntime_greedy.cs"])
    return ["env", f"LD_LIBRARY_PATH={folder}", "mono", str(program)]


@pytest.fixture(scope="module", params=[build_cpp, build_cs], ids=["cpp", "cs"])
def greedy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of a compiled program."""
    return request.param(tmp_path_factory.mktemp("greedy"))


@pytest.mark.slow
@pytest.mark.parametrize("still", [{}, {"layer_types": MIXED}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_compiled_programs_answer_as_the_runner(
    still: dict[str, object], dtype: str, greedy: list[str], export_tiny: Exporter
) -> None:
    package = export_tiny("llama", dtype, **still).path  # type: ignore[arg-type]
    done = subprocess.run([*greedy, str(package), "20", "5", "6", "7", "8"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    model = OrtModel(package, threads=1)
    model.start()
    assert [int(token) for token in done.stdout.split()] == list(model.generate([5, 6, 7, 8], 20, Sampling()))


@pytest.mark.slow
def test_the_cpp_program_reads_long_prompts_in_pieces(tmp_path: Path, export_tiny: Exporter) -> None:
    package = export_tiny("llama", "float32", options={"prefill_tokens": 32}).path
    prompt = [5 + i * 37 % 50 for i in range(2 * open_package(package).manifest["prefill_tokens"] + 7)]
    done = subprocess.run([*build_cpp(tmp_path), str(package), "3", *map(str, prompt)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    model = OrtModel(package, threads=1)
    model.start()
    assert [int(token) for token in done.stdout.split()] == list(model.generate(prompt, 3, Sampling()))


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--in-place"]], ids=str)
@pytest.mark.parametrize(
    "still", [{}, {"layer_types": MIXED}, {"overflow": "fold_oldest", "capacity_tokens": 40}], ids=str
)
def test_the_python_program_answers_as_the_runner(
    still: dict[str, object],
    words: list[str],
    export_tiny: Exporter,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = export_tiny(**still).path  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "argv", ["onnxruntime_greedy.py", str(package), "20", "5", "6", "7", "8", *words])
    capsys.readouterr()
    runpy.run_path(str(ROOT / "examples/onnxruntime_greedy.py"), run_name="__main__")
    model = OrtModel(package, threads=1)
    model.start()
    answer = [int(token) for token in capsys.readouterr().out.split()]
    assert answer == list(model.generate([5, 6, 7, 8], 20, Sampling()))


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_program_of_genai_writes_text(tmp_path: Path) -> None:
    program = build_cpp(tmp_path, "genai_text.cpp", "--genai")
    package = lower(exported(tmp_path / "model", "llama"), "genai", tmp_path / "genai").path
    done = subprocess.run([*program, str(package), "20", "Who?"], capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stderr[-2000:]
    model = OrtModel(package, threads=1)
    text = Text(model)
    model.start()
    ids = list(model.generate(text.encode("Who?"), 20, Sampling()))
    expected = text.tokenizer.decode(ids).replace("\ufffd", "")  # genai leaves out what is no character
    assert len(expected) > 3 and done.stdout == expected + "\n"


@pytest.mark.parametrize("version", ["8.6.1", "10.3.0", "11.1.0"])
@pytest.mark.parametrize("length", [1, 2, 13])
def test_the_tensorrt_program_answers_as_the_runner(
    version: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over the stand-in for TensorRT, which has a version's Python API and no more, and checks every shape and address."""
    package = trt_package(tmp_path / "trt", monkeypatch, "float32", batch=3, prefill_tokens=4)
    fake_tensorrt.install(monkeypatch, version)
    build_engines(package)
    prompt = [3 + i for i in range(length)]
    model = TrtModel(package.path)
    model.start()
    wanted = list(model.generate(prompt, 20, Sampling()))
    del model
    fake_tensorrt.install(monkeypatch, version)  # a process of its own: no plugin is registered
    others = ctypes.CDLL

    def open_library(path: Any, *arguments: Any, **options: Any) -> Any:
        return HostLibrary() if path == "libcuda.so.1" else others(path, *arguments, **options)

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    words = ["tensorrt_greedy.py", str(package.path), "20", *map(str, prompt)]
    monkeypatch.setattr(sys, "argv", words)
    capsys.readouterr()
    runpy.run_path(str(ROOT / "examples/tensorrt_greedy.py"), run_name="__main__")
    assert [int(token) for token in capsys.readouterr().out.split()] == wanted
