"""What still_run says before an engine runs, with stand-ins for the driver and for TensorRT's library; needs the headers.

A runtime of TensorRT itself is not played here: docs/reference/targets.md says where still_run ran.
"""

import copy
import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from still_export.targets.trt.plugins import INCLUDE_VARIABLE, build_plugins
from tests.still_export.package.manifest_cases import BASE

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [p for p in os.environ.get(INCLUDE_VARIABLE, "").split(os.pathsep) if p]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDERS or not shutil.which("cmake"), reason=f"needs cmake and {INCLUDE_VARIABLE}"),
]

MANIFEST = {k: v for k, v in BASE.items() if k not in ("native", "plugins")}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"entry": {"archs": []}}, "engines[0].archs has no architecture"),
    ({"entry": {"file": "../engine.plan"}}, "engines[0].file is '../engine.plan', which files does not list"),
    ({"format_version": 1}, "format version 1"),
]
"""Of a manifest; test_manifest.py has the rest."""


@pytest.fixture(params=FOLDERS)
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """still_run and its generation of TensorRT."""
    build = build_plugins(tmp_path / "build", tensorrt_include=Path(request.param), runner=True)
    version = (Path(request.param) / "NvInferVersion.h").read_text()
    found = re.search(r"define (?:NV_TENSORRT_MAJOR|TRT_MAJOR_ENTERPRISE) +(\d+)", version)
    assert found
    return build / "runner/still_run", found[1]


def driver_source() -> str:
    """A driver of capability 9.0 whose every other function does nothing."""
    names = re.findall(r'= (?:find|need)\("(cu\w+)"\);', (ROOT / "plugins/core/driver.h").read_text())
    plain = "".join(f"int {n}(void) {{ return 0; }}\n" for n in names if n != "cuDeviceGetAttribute")
    return plain + "int cuDeviceGetAttribute(int* v, int a, int d) { *v = a == 75 ? 9 : 0; return 0; }\n"


def test_what_does_not_fit_is_said(runner: tuple[Path, str], tmp_path: Path) -> None:
    program, major = runner
    package, libraries = tmp_path / "package", tmp_path / "libraries"
    package.mkdir()
    libraries.mkdir()

    def refused(*arguments: str, words: str) -> None:
        environment = {"LD_LIBRARY_PATH": str(libraries), "XDG_CONFIG_HOME": str(tmp_path)}
        done = subprocess.run([program, *arguments], capture_output=True, text=True, env=environment)
        assert done.returncode == 2 and words in done.stderr, (words, done.returncode, done.stderr)

    def refused_with(
        words: str, entry: dict[str, Any] | None = None, flags: tuple[str, ...] = (), **changes: Any
    ) -> None:
        manifest = copy.deepcopy(MANIFEST | changes)
        if manifest["engines"]:
            manifest["engines"][0].update({"tensorrt": f"{major}.6.1", "size_bytes": 4} | (entry or {}))
        for name in ("engine.plan", f"libstill_tensorrt{major}_static.so"):
            if (package / name).is_file() and name not in changes:
                content = (package / name).read_bytes()
                manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
        (package / "manifest.json").write_text(json.dumps(manifest))
        refused(str(package), "--prompt-ids", "1", *flags, words=words)

    def library(name: str, source: str = "") -> None:
        (tmp_path / "stub.c").write_text(source)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", name, tmp_path / "stub.c"], check=True)

    refused(words="give a package")
    refused("nowhere", "--prompt-ids", "1", words="nowhere/manifest.json cannot be opened")
    refused("nowhere", "--prompt-ids", "1,x", words="--prompt-ids x is no number")
    refused("nowhere", "--prompt-ids", "5000000000", words="--prompt-ids 5000000000 is too large")
    refused("nowhere", "--tokens", words="--tokens needs a value")
    for flag in ("--prompt", "--chat"):
        refused("nowhere", flag, "Hello", words=f"{flag}: this program has no tokenizer and no chat template")
    refused("nowhere", "--prompt-ids", "1", "--tokens", "0", words="at least one token")
    refused_with("libcuda.so.1")
    library(f"{libraries}/libcuda.so.1", driver_source())
    refused_with("is a package for onnx", target="onnx")
    for wrong, words in WRONG:
        refused_with(words, **wrong)
    refused_with("has no engine yet. Build it on this machine: still-export build", engines=[])
    refused_with("engine.plan cannot be opened")
    (package / "engine.plan").write_bytes(b"plan")
    refused_with("has 4 bytes, the manifest says 7: it is truncated or replaced", {"size_bytes": 7})
    refused_with("holds no weights (--strip-weights)", {"stripped": True})
    refused_with("built for sm_87, this GPU is sm_90", {"archs": ["sm_87"]})
    refused_with(f"built by TensorRT 7.0.0, this program for TensorRT {major}", {"tensorrt": "7.0.0"})
    refused_with(
        f"built by TensorRT 12.0.0, this program for TensorRT {major}",
        {"tensorrt": "12.0.0"},
        trt={"version_compatible": True},
    )
    refused_with(f"libnvinfer.so.{major} cannot be opened. Install TensorRT {major}.6.1")
    library(f"{libraries}/libnvinfer.so.{major}")
    refused_with(f"libstill_tensorrt{major}_static.so cannot be loaded")
    library(f"{package}/libstill_tensorrt{major}_static.so")
    refused_with("was not built on this machine, and loading it runs its maker's code")
    (tmp_path / "still-export").mkdir()
    refused_with("it is no TensorRT runtime", flags=("--trust-native",))
    refused_with("it is no TensorRT runtime")  # remembered
    library(f"{libraries}/libnvinfer.so.{major}", "void* createInferRuntime_INTERNAL(void* l, int v) { return 0; }")
    refused_with("TensorRT made no runtime")
