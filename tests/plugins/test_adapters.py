"""The TensorRT adapters, compiled against real headers without warnings and called by a stand-in for TensorRT.

Set STILL_TENSORRT_INCLUDE to the include folders of NVIDIA/TensorRT's release branches, separated by colons; skipped without.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from still_export.export.plugins import INCLUDE_VARIABLE
from still_graphs.ops.hybrid_attention import HYBRID_ATTENTION
from tests.plugins.core_abi import write_archive
from tests.plugins.test_core import ABSENT, ATTRIBUTES, ROOT, absent_mask, variant

FOLDERS = [p for p in os.environ.get(INCLUDE_VARIABLE, "").split(os.pathsep) if p]
CUDA = Path("/usr/local/cuda/include")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDERS or not shutil.which("cmake"), reason=f"needs cmake and {INCLUDE_VARIABLE}"),
]


@pytest.mark.parametrize("include", FOLDERS)
def test_adapter(include: str, recorder: object, tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "archive", [variant()])
    configure = ["cmake", "-S", ROOT / "plugins", "-B", tmp_path / "build", "-DSTILL_WARNINGS_AS_ERRORS=ON"]
    options = [f"-DTENSORRT_INCLUDE_DIR={include}", f"-DSTILL_ARCHIVE={archive}", "-DSTILL_RUNNER=ON"]
    subprocess.run([*configure, *options], check=True, capture_output=True)
    done = subprocess.run(["cmake", "--build", tmp_path / "build"], capture_output=True, text=True)
    assert done.returncode == 0 and "warning" not in done.stdout + done.stderr, done.stdout + done.stderr

    libraries = sorted((tmp_path / "build/tensorrt").glob("libstill_tensorrt*.so"))
    assert len(libraries) == 2
    for library in libraries:
        symbols = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
        assert not re.search(r"nvinfer|cudart| cu[A-Z]|getPluginRegistry", symbols.stdout), (
            "links neither TensorRT nor CUDA"
        )
        exported = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
        entry = "getPluginCreators" if "tensorrt8" in library.name else "getCreators"
        assert {line.split()[-1] for line in exported.stdout.splitlines()} == {entry, "setLoggerFinder"}

    host = tmp_path / "fake_host"
    source = Path(__file__).with_name("fake_host.cpp")
    flags = ["-std=c++17", "-Wno-deprecated-declarations", "-isystem", include, "-isystem", CUDA]
    subprocess.run(["g++", *flags, "-o", host, source, "-ldl"], check=True)
    drivers = tmp_path / "drivers"
    drivers.mkdir()
    shutil.copyfile(recorder.path, drivers / "libcuda.so.1")  # type: ignore[attr-defined]
    kinds = {int: "i", float: "f", str: "s"}
    values = {**ATTRIBUTES, "absent_inputs": absent_mask(ABSENT), "activation_type": "float16"}
    arguments = [f"{name}={kinds[type(value)]}:{value}" for name, value in values.items()]
    both: list[list[str]] = []
    environment = {"LD_LIBRARY_PATH": str(drivers)}
    for flat in (False, True):
        command = [host, libraries[0], *arguments, *["flat"] * flat]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment)
        lines = ran.stdout.splitlines()
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert lines[0] == f"creator 1 still HybridAttention 1 fields {len(HYBRID_ATTENTION.attributes) + 2}"
        # output [B, T, H, D] as query; present_window_key [B, HK, 2*C, D] as the ring that came in, and so on
        expected = ("0.0 0.1 0.2", "0.0 8.1 8.2 8.3") if flat else ("0.0 0.1 0.2 0.3", "0.0 1.2 8.2 0.3")
        assert [line for line in lines if line.startswith("shape")][:2] == [
            f"shape {i}: {places}" for i, places in enumerate(expected)
        ]
        assert lines.count("enqueue 0") == 2
        assert int(next(line for line in lines if line.startswith("workspace")).split()[1]) > 0
        launches = [line.split()[1] for line in lines if line.startswith("cuLaunchKernel")]
        prefill = ("score", "select", *("features", "scan", "linear", "attend") * 2, "commit")
        assert launches == [f"{k}_kernel" for k in (*prefill, "decode")]
        assert not [line for line in lines if line.startswith("cuMemcpyDtoD")], "past and present were one buffer"
        assert "logged still: node node7: HybridAttention: the node lacks the attribute chunk_size" in ran.stdout
        both.append([line for line in lines if line.startswith(("workspace", "cuLaunch"))])
    assert both[0] == both[1], "the same launches, however heads lie"
