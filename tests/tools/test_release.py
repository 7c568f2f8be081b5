"""What a release publishes, in the short form: built, audited, installed beside nothing of the clone, and used."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from still_export.package.cache import CACHE_VARIABLE
from still_export.targets.trt.plugins import oldest_glibc
from still_export.version import __version__
from tests.test_imports import ROOT
from tools.release_trial import audit

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.slow
def test_a_release_in_short(kernels_cache: Path, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {CACHE_VARIABLE: str(kernels_cache), "PYTHON": sys.executable}
    command = ["bash", "tools/release.sh", str(tmp_path / "out"), "--short"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    made = sorted(path.name.replace(__version__, "VERSION") for path in (tmp_path / "out").iterdir())
    assert made[0] == "SHA256SUMS" and made[1:3] == [
        "still_export-VERSION-py3-none-any.whl",
        "still_export-VERSION.tar.gz",
    ]
    assert made[3].startswith("still_export_kernels-VERSION-py3-none-manylinux_2_") and len(made) == 4
    assert "run, run_ort.py, serve: " in done.stdout and "PASSED" in done.stdout


def test_both_distributions_have_one_version() -> None:
    (kernels,) = PROJECT["optional-dependencies"]["kernels"]
    assert kernels.startswith(f"still-export-kernels=={__version__};")
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """uv from the index: it resolves from metadata, where pip downloads vLLM's 336 MB."""
    folder = tmp_path_factory.mktemp("uv")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), "uv"], check=True)
    return folder / "bin" / "uv"


@pytest.mark.long
@pytest.mark.parametrize("python", ["3.11", "3.14"])
@pytest.mark.parametrize("extra", sorted({*PROJECT["optional-dependencies"]} - {"kernels"}))
def test_an_extra_can_be_installed_beside_the_rest(extra: str, python: str, uv: Path, tmp_path: Path) -> None:
    """What `pip install still-export[EXTRA]` takes from the index exists. kernels is published with this version."""
    command = [str(uv), "pip", "compile", "-q", "pyproject.toml", "--extra", extra, "--python-version", python]
    done = subprocess.run([*command, "-o", str(tmp_path / "found.txt")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("found, fits", [("2_28", True), ("2_17", True), ("2_34", False), (None, False)])
def test_a_wheel_for_older_systems_than_it_says_is_refused(found: str | None, fits: bool, tmp_path: Path) -> None:
    report = tmp_path / "report"
    report.write_text(
        f'w.whl is\nconsistent with the following platform tag:\n"manylinux_{found}_aarch64".\n' if found else "no ELF"
    )
    wheel = "still_export_kernels-1-py3-none-manylinux_2_28_aarch64.whl"
    if fits:
        audit(wheel, str(report))
    else:
        with pytest.raises(SystemExit, match="auditwheel"):
            audit(wheel, str(report))


def test_the_oldest_glibc_is_the_newest_that_a_symbol_names(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.write_bytes(b"\0GLIBC_2.4\0GLIBC_2.36\0GLIBCXX_2.99\0GLIBC_2.17\0")
    assert oldest_glibc(library) == 36
    library.write_bytes(b"statically linked")
    assert oldest_glibc(library) == 0
