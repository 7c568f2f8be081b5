"""Records of proofs and benchmarks, one JSON file for each run: hashes of what ran, machine, judge, results."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from still_export.package.files import ARCHIVE, DATA, MODEL
from still_export.package.staging import write_whole
from still_export.proof.constants import PROOF_VERSION
from still_export.proof.inputs import Input
from still_export.runtime.cuda_driver import CudaError, Driver

DISTRIBUTIONS = (
    *("still-export", "torch", "transformers", "triton", "numpy", "onnx", "onnxruntime", "onnxruntime-gpu"),
    *("onnxruntime-genai", "tensorrt", "tensorrt-rtx", "vllm", "ray"),
)
"""Packages whose versions a record has."""
INSTRUCTIONS = ("avx512f", "avx2")
"""Instruction sets of x86 that kernels are compiled for, the widest first."""
WORTH = "digest is no signature: it finds damage and later edits, anybody can compute it, so it does not say who wrote this; repeat command"
COMMIT = "STILL_COMMIT"
"""Environment variable with the commit of sources that were copied without their clone."""

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Strict(BaseModel):
    """Immutable, without extra fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Machine(Strict):
    """Where it ran: the system, the processor and its logical cores, memory in GiB, and the GPU as its driver names it.

    kind: What kernels are compiled for: "sm_90", or "x86_64 avx2".
    """

    kind: str
    system: str
    processor: str
    cores: int
    memory_gib: float
    gpu: str | None = None


class Record(Strict):
    """One proof or benchmark.

    Attributes:
        name: What it is called in tables; with the machine and the date it is the file's name, too.
        subject: What was run: package, model, target, runtime, type and whatever else identifies it.
        command: What repeats it.
        date: When it ended, with its zone.
        commit: Of the sources, with "-dirty" where files differed from it; None where that is not known.
        versions: Of Python and of DISTRIBUTIONS, and those that the caller knows of, such as a driver's.
        verdict: Of a proof whether it passed; of a benchmark "measured".
        figures: What it showed, with the unit in each name.
        judge: PROOF_VERSION of the proof.
        ran: SHA-256 of what ran: "graph" and "weights" of a package, the "archive" of its kernels, and an engine's "plan".
        inputs: Of a proof what its reference was read from: role, path, SHA-256, and who named it.
        not_asked: What the proof left open.
        worth: WORTH, for whoever reads the file alone.
        digest: SHA-256 of all the rest, so that what is edited later is seen.
    """

    kind: Literal["proof", "benchmark"]
    name: Annotated[str, Field(min_length=1)]
    subject: dict[str, str]
    command: Annotated[str, Field(min_length=1)]
    date: datetime
    commit: str | None
    machine: Machine
    versions: dict[str, str]
    seed: int | None = None
    verdict: Literal["passed", "failed", "measured"]
    figures: dict[str, JsonValue]
    judge: int
    ran: dict[str, Sha256]
    inputs: tuple[dict[str, str], ...] = ()
    not_asked: tuple[str, ...] = ()
    worth: str = ""
    digest: Sha256

    @model_validator(mode="after")
    def _is_whole(self) -> Record:
        if (self.verdict == "measured") != (self.kind == "benchmark"):
            raise ValueError(
                f"verdict {self.verdict!r} of a {self.kind}: a proof passed or failed, a benchmark measured"
            )
        if self.date.tzinfo is None:
            raise ValueError("date has no zone: end it with Z")
        if self.digest != _digest(self.model_dump(mode="json", exclude={"digest"}, exclude_unset=True)):
            raise ValueError("it was changed after it was written")
        return self


def what_ran(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What a package runs, hashed: its graph and weights, the archive of its kernels, and an engine's plan."""
    engines = manifest.get("engines") or [{"file": ""}]
    library = (manifest.get("native") or {}).get("library", ARCHIVE)
    files = {"graph": MODEL, "weights": DATA, "archive": library, "plan": engines[0]["file"]}
    return {part: manifest["files"][name]["sha256"] for part, name in files.items() if name in manifest["files"]}


def make_record(
    kind: Literal["proof", "benchmark"],
    name: str,
    subject: dict[str, str],
    figures: dict[str, Any],
    ran: Mapping[str, str],
    passed: bool | None = None,
    seed: int | None = None,
    command: Sequence[str] | None = None,
    versions: dict[str, str] | None = None,
    inputs: Sequence[Input] = (),
    not_asked: Sequence[str] = (),
) -> Record:
    """A record of a run that just ended on this machine.

    Args:
        ran: Its parts, from `what_ran`; empty without a package.
        command: Words of its command; empty: this process's own.
        versions: Versions besides those found here.
    """
    found: dict[str, Any] = {
        "kind": kind,
        "name": name,
        "subject": subject,
        "command": shlex.join(command or _own_command()),
        "date": f"{datetime.now(UTC).replace(microsecond=0):%Y-%m-%dT%H:%M:%SZ}",
        "commit": find_commit(),
        "machine": find_machine().model_dump(),
        "versions": {**find_versions(), **(versions or {})},
        "seed": seed,
        "verdict": "measured" if kind == "benchmark" else "passed" if passed else "failed",
        "figures": figures,
        "judge": PROOF_VERSION,
        "ran": dict(ran),
        "inputs": [vars(each) for each in inputs],
        "not_asked": list(not_asked),
        "worth": WORTH,
    }
    return Record.model_validate({**found, "digest": _digest(found)})


def write_record(record: Record, folder: Path) -> Path:
    """Write a record into `folder` under a unique name, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", f"{record.name} {record.machine.gpu or record.machine.processor}".lower()).strip(
        "-"
    )
    path = folder / f"{slug}-{record.date:%Y%m%dT%H%M%SZ}-{record.digest[:6]}.json"
    write_whole(path, record.model_dump_json(indent=1, exclude_unset=True) + "\n")
    return path


def find_machine() -> Machine:
    try:
        driver = Driver()
        gpu, kind = str(driver.name), f"sm_{driver.architecture}"
    except (CudaError, OSError):
        gpu, kind = None, _instructions()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return Machine(
        kind=kind,
        system=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        cores=os.cpu_count() or 1,
        memory_gib=round(memory / 2**30, 1),
        gpu=gpu,
    )


def find_versions() -> dict[str, str]:
    """Of Python, and of DISTRIBUTIONS where they are installed."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def find_commit() -> str | None:
    """The commit of the sources, with "-dirty" if tracked files differ; outside a clone the variable COMMIT, or None."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return _carried_commit()
    return done.stdout.strip() if done.returncode == 0 else _carried_commit()


def _carried_commit() -> str | None:
    return commit[:12] if (commit := os.environ.get(COMMIT)) else None


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _instructions() -> str:
    try:
        flags = set(re.findall(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)[0].split())
    except (OSError, IndexError):
        flags = set()
    return " ".join([platform.machine(), *[name for name in INSTRUCTIONS if name in flags][:1]])


def _own_command() -> list[str]:
    """This process's command for another machine: modules by name, paths without local folders."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = "" if spec is None else spec.name.removesuffix(".__main__")
    own = ["still-export"] if module.startswith("still_export") else ["python", "-m", module]
    words = [re.sub(r"(^|=)(/[^/]+)*/(?=[^/])", r"\1", word) for word in sys.argv[1:]]
    return [*(own if module else [Path(sys.argv[0]).name]), *words]


def figures_line(found: Mapping[str, Any]) -> str:
    """Numbers and words of a record's figures in one line, without lists."""
    shown = ((name, value) for name, value in found.items() if isinstance(value, int | float | str))
    return ", ".join(f"{name.replace('_', ' ')} {f'{v:.3g}' if isinstance(v, float) else v}" for name, v in shown)
