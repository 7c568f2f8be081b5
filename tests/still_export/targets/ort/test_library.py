"""The library of kernels: found in a wheel or the cache, built once, taken by exports without a flag; the headers that it is built with."""

import hashlib
import io
import os
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from still_export.cli.main import main
from still_export.errors import ConfigError
from still_export.package.cache import CACHE_VARIABLE
from still_export.package.trust import trusts
from still_export.targets.ort import headers, library
from still_export.targets.ort.headers import HEADER, fetch_headers, find_onnxruntime_headers
from still_export.targets.ort.library import LIBRARY, build_library, cached_library, find_library, this_cpu
from still_export.targets.ort.options import OrtOptions
from still_export.targets.trt.plugins import PluginBuildError
from tests.still_export.conftest import Exporter
from tests.still_export.packages import install_kernels
from tests.still_export.targets.ort.test_native import built  # noqa: F401


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


class Compiler:
    """Stands for CMake: writes a text, and counts."""

    def __init__(self) -> None:
        self.builds: list[dict[str, Any]] = []

    def __call__(self, source: Path, build: Path, options: dict[str, Any], target: str) -> Path:
        self.builds.append(options)
        time.sleep(0.2)
        (build / "onnxruntime").mkdir(parents=True, exist_ok=True)
        (build / "onnxruntime" / LIBRARY).write_text(f"library {len(self.builds)} {options['STILL_ARCHIVE']}")
        return build


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    found = Compiler()
    monkeypatch.setattr(library, "run_cmake", found)
    (tmp_path / HEADER).touch()
    monkeypatch.setenv(headers.INCLUDE_VARIABLE, str(tmp_path))
    return found


def test_built_once(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """By processes that come at the same time, too; other flags ask for another library."""
    assert find_library() is None
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(build_library())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiler.builds) == 1 and set(found) == {find_library()} == {cached_library(this_cpu())}
    assert found[0].read_text() == "library 1 None"
    monkeypatch.setenv("CXXFLAGS", "-g")
    assert find_library() is None


@pytest.mark.parametrize("damage", ["cut", "exchanged", "without a hash"])
def test_a_damaged_library_is_built_again(compiler: Compiler, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before it is copied, trusted or loaded."""
    cached = build_library()
    if damage == "cut":
        os.truncate(cached, 3)
    elif damage == "exchanged":
        cached.write_bytes(b"another")
    else:
        cached.with_name(library.DIGEST).unlink()
    assert find_library() is None and "is not the file that was built" in capsys.readouterr().err
    assert build_library() == cached == find_library()
    assert len(compiler.builds) == 2 and cached.read_text() == "library 2 None"


def test_the_first_export_builds_it(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from still_export.cli.export import _build_kernels
    from still_export.cli.output import Output

    here = ["cmake", "c++"]
    monkeypatch.setattr(library.shutil, "which", lambda name: name if name in here else None)
    monkeypatch.delenv("CXX", raising=False)
    _build_kernels(Output(False, False))
    assert not compiler.builds  # the environment of the tests says so
    monkeypatch.delenv(library.BUILD_VARIABLE)
    here.remove("c++")
    _build_kernels(Output(False, False))
    assert not compiler.builds and not capsys.readouterr().err
    here.append("g++")
    for _ in range(2):
        _build_kernels(Output(False, False))
    assert len(compiler.builds) == 1 and find_library() is not None
    said = capsys.readouterr().err
    assert said.count("building the kernels for this processor, once") == 1 and said.count("kernels built in ") == 1


def test_other_sources_are_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core/op.cpp").write_text("one")
    monkeypatch.setattr(library, "SOURCE", tmp_path)
    before = cached_library("x86_64")
    assert cached_library("aarch64") != before == cached_library("x86_64")
    (tmp_path / "core/op.cpp").write_text("two")
    assert cached_library("x86_64") != before


def test_kernels_of_the_gpu_leave_the_cached_library_alone(compiler: Compiler, tmp_path: Path) -> None:
    cached, archive = build_library(), tmp_path / "kernels.bin"
    library.build_with_archive(archive, tmp_path / "linked.so")
    assert (tmp_path / "linked.so").read_text() == f"library 2 {archive}"
    assert cached.read_text() == "library 1 None" and build_library() == cached


def test_a_distribution_brings_it(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """still-export-kernels, if it was compiled from these sources for the processors that are asked for."""
    brought = install_kernels(tmp_path / "site", monkeypatch, "aarch64")
    assert find_library("aarch64") == build_library("aarch64") == brought
    assert find_library("x86_64") is None and not compiler.builds and not capsys.readouterr().err
    monkeypatch.setattr(library, "sources_digest", lambda: "of another version")
    assert find_library("aarch64") is None and "is of other sources" in capsys.readouterr().err


def test_another_processor_needs_its_compiler(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        PluginBuildError, match=r"aarch64-linux-gnu-g\+\+, which is not installed\. Install g\+\+-aarch64"
    ):
        build_library("aarch64")
    (tmp_path / "aarch64-linux-gnu-g++").touch(0o755)
    build_library("aarch64")
    (options,) = compiler.builds
    assert options["CMAKE_SYSTEM_PROCESSOR"] == "aarch64" and find_library("aarch64") and not find_library("x86_64")


def test_flags_that_contradict() -> None:
    with pytest.raises(ConfigError, match="--cpu riscv64 is unknown; known: x86_64, aarch64"):
        OrtOptions(cpu="riscv64")
    with pytest.raises(ConfigError, match="--no-native leaves out the kernels"):
        OrtOptions(native=False, cpu="aarch64")
    with pytest.raises(ConfigError, match="leave out --cpu"):
        OrtOptions(cpu="aarch64", archs=("sm_90",))


@pytest.mark.slow
@pytest.mark.usefixtures("built")
def test_exports_take_it_without_a_flag(export_tiny: Exporter, tmp_path: Path) -> None:
    """Where it is there and computes the type; --no-native leaves it out, a manifest that left it out does so again."""
    model = str(export_tiny().path.parent / "model")
    options = ["--to", "onnx", "--quiet", "-o"]

    def exported(name: str, *more: str) -> list[str]:
        with pytest.raises(SystemExit, match=r"^0$"):
            main([*more, *options, str(tmp_path / name)])
        return [path.name for path in (tmp_path / name).glob("*.so")]

    assert exported("with", model) == [LIBRARY]
    assert trusts(hashlib.sha256((tmp_path / "with" / LIBRARY).read_bytes()).hexdigest())
    assert exported("without", model, "--no-native") == []
    assert exported("again", "export", "--config", str(tmp_path / "without/manifest.json")) == []
    assert exported("bfloat16", model, "--dtype", "bfloat16") == []


@pytest.mark.slow
@pytest.mark.long
def test_where_there_is_none_the_export_says_how_to_get_it(
    export_tiny: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(export_tiny().path.parent / "model")
    for flags, said in (([], True), (["--no-native"], False)):
        with pytest.raises(SystemExit, match=r"^0$"):
            main([model, "--to", "onnx", "-o", str(tmp_path / f"package{said}"), *flags])
        assert ("still-export kernels build" in " ".join(capsys.readouterr().err.split())) == said
    assert not list(tmp_path.glob("*/*.so"))


def test_the_verb(compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["kernels", "build", "--quiet"])
    assert capsys.readouterr().out.split() == [str(find_library())]
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["kernels", "build", "--cpu", "riscv64"])
    assert "known: x86_64, aarch64" in capsys.readouterr().err


def test_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(headers.INCLUDE_VARIABLE, raising=False)
    monkeypatch.setattr(headers, "USUAL_INCLUDES", (str(tmp_path / "usual"),))
    with pytest.raises(PluginBuildError, match="libonnxruntime-dev"):
        find_onnxruntime_headers()
    with pytest.raises(PluginBuildError, match=r"has no onnxruntime_c_api\.h"):
        find_onnxruntime_headers(tmp_path)
    for name in ("usual", "named"):
        (tmp_path / name).mkdir()
        (tmp_path / name / HEADER).touch()
    assert find_onnxruntime_headers() == tmp_path / "usual"
    monkeypatch.setenv(headers.INCLUDE_VARIABLE, str(tmp_path / "named"))
    assert find_onnxruntime_headers() == tmp_path / "named"
    assert find_onnxruntime_headers(tmp_path / "usual") == tmp_path / "usual"


def _package(names: list[str]) -> bytes:
    """A Debian package with empty files of these names."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    content = data.getvalue()
    return b"!<arch>\n" + f"{'data.tar.xz/':<48}{len(content):<10}`\n".encode() + content


def test_headers_are_fetched_once_and_checked(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    monkeypatch.delenv(headers.INCLUDE_VARIABLE, raising=False)
    monkeypatch.setattr(headers, "USUAL_INCLUDES", ())
    package = _package([f"./usr/include/onnxruntime/{HEADER}", "./usr/include/onnxruntime/cpu.h", "./usr/share/doc"])
    asked: list[str] = []

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO(package)

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    with pytest.raises(PluginBuildError, match="its SHA-256 differs"):
        fetch_headers()
    monkeypatch.setattr(headers, "SHA256", hashlib.sha256(package).hexdigest())
    assert fetch_headers() == fetch_headers() == find_onnxruntime_headers()
    assert asked == [headers.URL] * 2 and sorted(os.listdir(fetch_headers())) == ["cpu.h", HEADER]

    def fail(url: str, timeout: float) -> None:
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.urlopen", fail)
    monkeypatch.setenv(CACHE_VARIABLE, str(empty_cache / "another"))
    with pytest.raises(PluginBuildError, match=r"no network.*--onnxruntime-include"):
        fetch_headers()
