"""The TensorRT adapters, compiled against real headers without warnings and called by a stand-in for TensorRT.

Set STILL_TENSORRT_INCLUDE to the include folders of NVIDIA/TensorRT's release branches, separated by colons; skipped without.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from still_export.export.plugins import INCLUDE_VARIABLE, pack_archive
from still_graphs.ops import OPS, OpSpec
from still_graphs.ops.attention import ATTENTION
from still_graphs.ops.hybrid_attention import HYBRID_ATTENTION
from still_kernels.attention.variants import KERNELS as ATTENTION_KERNELS
from tests.plugins.core_abi import Recorder, write_archive
from tests.plugins.test_core import ABSENT, ATTRIBUTES, ROOT, absent_mask, variant

FOLDERS = [p for p in os.environ.get(INCLUDE_VARIABLE, "").split(os.pathsep) if p]
CUDA = Path("/usr/local/cuda/include")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDERS or not shutil.which("cmake"), reason=f"needs cmake and {INCLUDE_VARIABLE}"),
]


KINDS = {int: "i", float: "f", str: "s"}


def attention_archive(folder: Path) -> Path:
    """An archive of still::Attention with a variant whose cubins are text."""
    build = ATTENTION_KERNELS.build(ATTENTION_KERNELS.variant(), 90)
    kernels = {
        name: {
            "symbol": f"{name}_kernel",
            "threads": 128,
            "num_warps": 4,
            "shared_bytes": 1000,
            "trailing_null_pointers": 2,
            "args": [{"name": n, "type": kind} for n, kind in arguments],
        }
        for name, arguments in {
            "attend": [("query", "ptr"), ("present_key", "ptr"), ("output", "ptr"), ("T", "i32"), ("scale", "f32")],
            "decode": [("present_value", "ptr"), ("part_acc", "ptr"), ("counters", "ptr"), ("NS", "i32"), ("N", "i32")],
        }.items()
    }
    key = {"dtype": "float16", "head_dim": 64, "count_dtype": "int32", "packed": 0}
    entry = {"key": key, "arch": "sm_90", "constants": build.plan_constants, "kernels": kernels}
    write_archive(folder, [entry], op="still::Attention", plan=ATTENTION_KERNELS.plan.data)
    return folder


@pytest.mark.parametrize("include", FOLDERS)
def test_adapter(include: str, recorder: Recorder, tmp_path: Path) -> None:
    write_archive(tmp_path / "hybrid", [variant()])
    archive = pack_archive([tmp_path / "hybrid", attention_archive(tmp_path / "softmax")], tmp_path / "kernels.bin")
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
    shutil.copyfile(recorder.path, drivers / "libcuda.so.1")

    prefill = ("score", "select", *("features", "scan", "linear", "attend") * 2, "commit")
    hybrid = {**ATTRIBUTES, "absent_inputs": absent_mask(ABSENT)}
    # Shapes of output [B, T, H, D] and of the first state, by input and place; the latter too with heads side by side.
    ring = ("0.0 1.2 8.2 0.3", "0.0 8.1 8.2 8.3")
    check_op(host, libraries[0], drivers, HYBRID_ATTENTION, hybrid, ring, (*prefill, "decode"))
    cache = ("0.0 1.2 5.2 0.3", "0.0 5.1 5.2 5.3")
    check_op(host, libraries[0], drivers, ATTENTION, {"absent_inputs": 0}, cache, ("attend", "decode"))


def check_op(
    host: Path,
    library: Path,
    drivers: Path,
    spec: OpSpec,
    values: dict[str, Any],
    states: tuple[str, str],
    kernels: tuple[str, ...],
) -> None:
    """One op through the host: its shapes, and `kernels` launched by a call of 150 tokens and one of a single token."""
    values = {**values, "activation_type": "float16"}
    arguments = [f"{name}={KINDS[type(value)]}:{value}" for name, value in values.items()]
    both: list[list[str]] = []
    for flat, state in zip((False, True), states, strict=True):
        command = [host, library, spec.name, *arguments, *["flat"] * flat]
        ran = subprocess.run(command, capture_output=True, text=True, env={"LD_LIBRARY_PATH": str(drivers)})
        lines = ran.stdout.splitlines()
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert lines[0] == f"creator {len(OPS)} still {spec.name} 1 fields {len(spec.attributes) + 2}"
        assert [line for line in lines if line.startswith("shape")][:2] == [
            f"shape 0: {'0.0 0.1 0.2' if flat else '0.0 0.1 0.2 0.3'}",
            f"shape 1: {state}",
        ]
        assert lines.count("enqueue 0") == 2
        assert int(next(line for line in lines if line.startswith("workspace")).split()[1]) > 0
        launches = [line.split()[1] for line in lines if line.startswith("cuLaunchKernel")]
        assert launches == [f"{kernel}_kernel" for kernel in kernels]
        assert not [line for line in lines if line.startswith("cuMemcpyDtoD")], "past and present were one buffer"
        first = next(iter(values))
        assert f"logged still: node node7: {spec.name}: the node lacks the attribute {first}" in ran.stdout
        both.append([line for line in lines if line.startswith(("workspace", "cuLaunch"))])
    assert both[0] == both[1], "the same launches, however heads lie"
