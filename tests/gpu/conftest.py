"""What proofs on a GPU share: the packages that were prepared for them, TensorRT's own Python, and the record of the run.

A proof takes the folder of packages from STILL_GPU_PLACE (`python -m tests.gpu.prepare` makes it, anywhere). A process writes one record
for each file, target and type that it ran into STILL_RECORDS, where that is set. TensorRT 8.6 has a Python of its own: STILL_TENSORRT_ENV
is a file for the shell that puts `trt-python` and `trt-polygraphy` on the path; without it TensorRT is asked in this Python.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from still_export.proof.records import Record, make_record, what_ran, write_record
from tests.still_export.conftest import Exporter, export_tiny
from tests.still_export.packages import with_library
from tools.verdicts import sum_up

__all__ = ["export_tiny"]

ROOT = Path(__file__).resolve().parents[2]
PLACE, RECORDS, TENSORRT = "STILL_GPU_PLACE", "STILL_RECORDS", "STILL_TENSORRT_ENV"
SHOWN: list[Record] = []
"""A record of each test of this process."""
OUTCOME = pytest.StashKey[tuple[bool, str]]()
LAST_LINES, MOST_LETTERS = 8, 700
"""Of what a failed test said, for its record: with the machine the rest is gone."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Keep whether the test passed, and why not, for its record; one that skips itself has none."""
    report = yield
    if report.when == "call" and not report.skipped:
        lines = [line.strip() for line in report.longreprtext.splitlines() if line.strip()]
        item.stash[OUTCOME] = report.passed, "; ".join(lines[-LAST_LINES:])[-MOST_LETTERS:]
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What others wait for comes first."""
    items.sort(key=lambda item: item.get_closest_marker("waited_for") is None)


def pytest_sessionfinish() -> None:
    """Write the records of what this process ran; a worker of pytest-xdist is one."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in SHOWN:
        subject = record.subject
        names = ("target", "runtime", "provider", "quantize", "dtype")
        file = record.name.partition("::")[0].removesuffix(".py")
        groups.setdefault((file, *(subject.get(name, "") for name in names)), []).append(record)
    for (file, *_), group in groups.items():
        write_record(sum_up(file, group), Path(os.environ[RECORDS]))


def prepared(name: str) -> Path:
    """A package of STILL_GPU_PLACE; the test is skipped where it is not there."""
    place = os.environ.get(PLACE)
    if not place:
        pytest.skip(f"{PLACE} names no folder of packages; python -m tests.gpu.prepare makes one")
    if not (found := Path(place).resolve() / name).is_dir():
        pytest.skip(f"{place} has no {name}; python -m tests.gpu.prepare makes it")
    return found


@dataclass
class Proof:
    """What a test shows: its subject, the parts that ran (records.what_ran), and the figures that it found on the way."""

    subject: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    ran: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    seed: int | None = 0

    def of(self, package: Path, **more: str) -> Path:
        """Say which package it is about; returns it."""
        manifest = json.loads((package / "manifest.json").read_text(encoding="utf-8"))
        self.subject |= {
            "package": package.name,
            "target": manifest["target"],
            "dtype": manifest["model"]["dtype"],
            **more,
        }
        self.ran = what_ran(manifest)
        return package


@pytest.fixture
def proof(request: pytest.FixtureRequest) -> Iterator[Proof]:
    """The test's record, made when it has passed or failed; one that was skipped has none."""
    made, begin = Proof(), time.monotonic()
    yield made
    outcome = request.node.stash.get(OUTCOME, None)
    if os.environ.get(RECORDS) and outcome is not None and made.subject:
        test = request.node.nodeid.split("/")[-1]
        passed, said = outcome
        failure = {} if passed else {"failure": said}
        figures = {**made.figures, **failure, "seconds": round(time.monotonic() - begin, 1)}
        command = ["pytest", "-m", "gpu or tensorrt", request.node.nodeid]
        given = {"passed": passed, "seed": made.seed, "command": command, "versions": made.versions}
        SHOWN.append(make_record("proof", test, made.subject, figures, made.ran, **given))


def run_command(command: str | list[str], log: Path, timeout_s: float, **environment: str) -> str:
    """Run it at the root of this tree; its output. Fails the test, with the end of the output, where it fails or does not end."""
    shell = ["bash", "-c", command] if isinstance(command, str) else command
    paths = os.pathsep.join([str(ROOT), str(ROOT / "graphs"), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    with log.open("w+", encoding="utf-8") as file:
        try:
            done = subprocess.run(
                shell, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, timeout=timeout_s,
                env={**os.environ, "PYTHONPATH": paths, **environment},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            pytest.fail(
                f"no end within {timeout_s:.0f} s: {command}\n{log.read_text(errors='replace')[-2000:]}", pytrace=False
            )
    output = log.read_text(encoding="utf-8", errors="replace")
    if done.returncode:
        pytest.fail(f"exit code {done.returncode}: {command}\n{output[-2000:]}", pytrace=False)
    return output


def told_by_verify(said: str) -> list[str]:
    """What it found beside its verdict: choices that differ, and how often the likeliest token is the same."""
    return [line for line in said.splitlines() if line.startswith(("selections:", "top-1"))]


def own_gpu() -> dict[str, str]:
    """Of several GPUs the one that this process of pytest takes, for builds share a GPU."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw"), torch.cuda.device_count()
    if not worker or count < 2:
        return {}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return {"CUDA_VISIBLE_DEVICES": seen.split(",")[int(worker) % count]}


@dataclass
class TensorRt:
    """TensorRT's Python, which may be another than this one; `seconds` says what each command took."""

    folder: Path
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self, command: str, timeout_s: float, name: str) -> str:
        """A shell command in which `still` is still-export, `module` runs one of this tree, and `polygraphy` is TensorRT's."""
        head = f'module() {{ {sys.executable} -m "$@"; }}; '
        if other := os.environ.get(TENSORRT):
            binaries = self.folder / "bin"
            binaries.mkdir(exist_ok=True)
            (binaries / "polygraphy").write_text(f'#!/bin/bash\n. {other}\ntrt-polygraphy "$@"\n')
            (binaries / "polygraphy").chmod(0o755)
            site = Path(os.environ.get(PLACE, ".")).resolve() / "site"
            head = (
                f". {other}; export PATH={binaries}:$PATH PYTHONPATH={site}:{ROOT}:{ROOT}/graphs:{ROOT}/kernels; "
                'module() { trt-python -m "$@"; }; '
            )
        head += 'still() { module still_export.cli.main "$@"; }; '
        begin = time.monotonic()
        shared = {"PYTHONUNBUFFERED": "1", **own_gpu()}
        said = run_command(head + command, self.folder / f"{name}.log", timeout_s, **shared)
        self.seconds[name] = round(time.monotonic() - begin, 1)
        return said


@pytest.fixture
def tensorrt(tmp_path: Path) -> TensorRt:
    """Where TensorRT's programs run, and leave their logs."""
    return TensorRt(tmp_path)


@pytest.fixture(scope="module")
def native_package(export_tiny: Exporter, library: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny package with kernels for this CPU."""
    folder = tmp_path_factory.mktemp("native") / "tiny"
    with_library(export_tiny(), library, folder)
    return folder
