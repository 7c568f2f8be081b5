"""The library of kernels for 64-bit ARM, made by a cross compiler: a loader of that processor takes it, and it registers its ops."""

import shutil
import subprocess
from pathlib import Path

import pytest

from still_export.package.cache import CACHE_VARIABLE
from still_export.targets.ort.headers import find_onnxruntime_headers
from still_export.targets.ort.library import build_library
from still_export.targets.trt.plugins import PluginBuildError

COMPILER, MACHINE = "aarch64-linux-gnu-g++", "qemu-aarch64"
LOADS = """
#include <dlfcn.h>
#include <cstdio>
int main(int, char** names)
{
    void* library = dlopen(names[1], RTLD_NOW | RTLD_LOCAL);
    if (!library)
        std::puts(dlerror());
    else
        std::puts(dlsym(library, "RegisterCustomOps") ? "registers" : "has no ops");
}
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(MACHINE)), reason=f"needs {COMPILER} and {MACHINE}")
def test_a_loader_of_its_own_machine_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    try:
        find_onnxruntime_headers()
    except PluginBuildError as error:
        pytest.skip(str(error))
    library = build_library("aarch64")
    (tmp_path / "loads.cpp").write_text(LOADS)
    subprocess.run([COMPILER, tmp_path / "loads.cpp", "-o", tmp_path / "loads", "-ldl"], check=True)

    def said(file: Path) -> str:
        command = [MACHINE, "-L", "/usr/aarch64-linux-gnu", tmp_path / "loads", file]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert said(library) == "registers"
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    assert "broken.so" in said(broken)
