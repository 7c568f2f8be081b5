"""The fuzz targets of tests/plugins/fuzz for some seconds each, under the address and undefined behaviour sanitizers.

`python tests/attack fuzz --seconds 3600` runs them for longer; a finding is repeated by its number (tests/plugins/fuzz/driver.cpp).
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.plugins import builds
from tests.plugins.core_abi import compile_recorder, write_archive
from tests.plugins.test_core import variant
from tests.still_export.package.manifest_cases import BASE_FILE

RUNS = {
    "binding": 60_000,
    "kernels": 2_500,
    "attention": 500,
    "linear_attention": 3_000,
    "archive": 7_000,
    "manifest": 30_000,
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(not shutil.which("cmake") or not shutil.which("g++"), reason="needs cmake and g++"),
]


@pytest.fixture(scope="session")
def targets() -> Path:
    return builds.sanitized("fuzz") / "fuzz"


def corpus(target: str, folder: Path) -> list[str]:
    """Arguments that name what the target's inputs are made from."""
    if target == "manifest":
        return ["--text", str(BASE_FILE)]
    if target != "archive":
        return []
    packed = write_archive(folder, [variant(), variant("sm_86")])
    length = int.from_bytes(packed.read_bytes()[8:16], "little")
    (folder / "index").write_bytes(packed.read_bytes()[16 : 16 + length])
    return ["--text", str(packed), str(folder / "index")]


@pytest.mark.parametrize("target", RUNS)
def test_no_finding(target: str, targets: Path, tmp_path: Path) -> None:
    at = tmp_path / "at"
    done = subprocess.run(
        [targets / f"fuzz_{target}", "--runs", str(RUNS[target]), *corpus(target, tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "STILL_FUZZ_AT": str(at), "STILL_FUZZ_DRIVER": str(compile_recorder(tmp_path))},
    )
    assert done.returncode == 0, f"input {int(at.read_text())} of seed 1: {done.stderr[-4000:]}"
    assert json.loads(done.stdout)["runs"] == RUNS[target]
