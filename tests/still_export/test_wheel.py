"""A wheel alone, in an environment that has no clone: it brings the C++ sources for `--to trt`. What else: tests/tools/test_release.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from still_export.targets.trt.plugins import find_tensorrt_headers
from tests.still_export.tiny import still_model

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("still_export", "kernels", "graphs", "plugins", "pyproject.toml", "setup.py", "README.md", "LICENSE")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("cmake") or not shutil.which("g++"), reason="needs cmake and g++"),
]


class Installed:
    """A virtual environment with the wheel, which sees the packages of this one but neither the clone nor PYTHONPATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        source = folder / "source"  # apart from the clone, whose build folder may hold what it no longer has
        for name in SOURCES:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                source.mkdir(exist_ok=True)
                shutil.copyfile(ROOT / name, source / name)
        self.environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        pip = [sys.executable, "-m", "pip"]
        self.check([*pip, "wheel", source, "--no-deps", "--no-build-isolation", "-q", "-w", folder / "wheels"])
        shutil.rmtree(source)
        venv.create(folder / "venv")
        self.python = folder / "venv/bin/python"
        site = sysconfig.get_path("purelib", vars={"base": str(folder / "venv")})
        Path(site, "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (wheel,) = (folder / "wheels").glob("still_export-*.whl")
        self.wheel = wheel
        self.check([*pip, "--python", self.python, "install", "-q", "--no-deps", "--no-index", wheel])

    def check(self, command: list[object]) -> str:
        """Standard output of `command`, which must succeed."""
        done = subprocess.run(
            list(map(str, command)), cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def still_export(self, *arguments: object) -> str:
        """Standard output of the command that the wheel installed."""
        return self.check([self.folder / "venv/bin/still-export", *arguments])


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    model = still_model("llama", torch.float32, chunk_size=32)  # a size that the GPU kernels have
    model.save_pretrained(folder / "model")
    made = Installed(folder)
    where = made.check([made.python, "-c", "import still_export, still_graphs; print(still_export.__file__)"])
    assert Path(where.strip()).is_relative_to(folder), "the test looks at the clone"
    return made


@pytest.mark.long
def test_the_wheel_is_one_for_an_index(installed: Installed) -> None:
    """Data beside the modules is in it."""
    names = zipfile.ZipFile(installed.wheel).namelist()
    for name in (
        "still_export/py.typed",
        "still_export/report/page.html",
        "still_export/texts/words.json",
        "still_export/linearization/recipes/exact.yaml",
        "still_plugins/write_op_specs.py",
        "still_plugins/CMakeLists.txt",
        "still_kernels/causal_conv/cpu/node.cpp",
    ):
        assert name in names
    assert installed.wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.long
def test_tensorrt(installed: Installed) -> None:
    """Kernels for an architecture; the plugin too where TensorRT's headers are, else the core that it is built around."""
    pytest.importorskip("triton")
    installed.still_export("model", "--to", "trt", "--arch", "sm_90", "-o", "trt", "-q")
    assert (installed.folder / "trt/kernels.bin").stat().st_size > 10_000
    if find_tensorrt_headers():
        assert list((installed.folder / "trt").glob("libstill_tensorrt*.so"))
        return
    code = "from still_export.targets.trt.plugins import build_plugins; from pathlib import Path; build_plugins(Path('core'))"
    installed.check([installed.python, "-c", code])
    assert (installed.folder / "core/libstill_core.so").is_file()
