"""Records of proofs and benchmarks: what was run, where, by which sources, and what it showed; a JSON file each."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from still_export.errors import ConfigError
from still_export.runtime.cuda_driver import CudaError, Driver
from still_export.targets.trt.plugins import SOURCE

DISTRIBUTIONS = (
    *("still-export", "torch", "transformers", "triton", "numpy", "onnx", "onnxruntime", "onnxruntime-gpu"),
    *("onnxruntime-genai", "tensorrt", "tensorrt-rtx", "vllm", "ray"),
)
"""Whose versions a record has, where they are installed."""
PLUGINS = "plugins"
"""The room of the C++ sources, which are no package."""
COMMIT = "STILL_COMMIT"
"""Environment variable: the commit of sources that were carried to this machine without their clone."""

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Room = Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")]


class Strict(BaseModel):
    """Nothing is added, nothing is changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Machine(Strict):
    """Where it ran: the system, the processor and its logical cores, memory in GiB, and the GPU as its driver names it."""

    system: str
    processor: str
    cores: int
    memory_gib: float
    gpu: str | None = None


class Record(Strict):
    """One proof or benchmark.

    Attributes:
        name: What it is called in tables; with the machine and the date it is the file's name, too.
        subject: What was run: package, model, target, runtime, type and whatever else tells it from its neighbours.
        command: What repeats it.
        date: When it ended, with its zone.
        commit: Of the sources, with "-dirty" where files differed from it; None where that is not known.
        versions: Of Python and of DISTRIBUTIONS, and those that the caller knows of, such as a driver's.
        verdict: Of a proof whether it passed; of a benchmark "measured".
        figures: What it showed, with the unit in each name.
        sources: The sources that it covers, by room, hashed.
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
    sources: dict[Room, Sha256]
    digest: Sha256

    @model_validator(mode="after")
    def _is_whole(self) -> Record:
        if (self.verdict == "measured") != (self.kind == "benchmark"):
            raise ValueError(
                f"verdict {self.verdict!r} of a {self.kind}: a proof passed or failed, a benchmark measured"
            )
        if self.date.tzinfo is None:
            raise ValueError("date has no zone: end it with Z")
        if self.digest != _digest(self.model_dump(mode="json", exclude={"digest"})):
            raise ValueError("it was changed after it was written")
        return self

    def stale_rooms(self) -> list[str]:
        """Rooms whose sources are no longer those that were run, or are gone."""
        return [room for room, found in self.sources.items() if _hash_or_none(room) != found]


def make_record(
    kind: Literal["proof", "benchmark"],
    name: str,
    subject: dict[str, str],
    figures: dict[str, Any],
    rooms: Iterable[str],
    passed: bool | None = None,
    seed: int | None = None,
    command: Sequence[str] | None = None,
    versions: dict[str, str] | None = None,
) -> Record:
    """A record of what ended just now, on this machine, by these sources.

    Args:
        rooms: Packages that it covers, dotted, such as `still_export.runtime` and `still_kernels`; "plugins" is the C++ sources.
        passed: Of a proof.
        command: Its words; this process's own without them.
        versions: Beside those that can be found here.
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
        "sources": {room: hash_room(room) for room in rooms},
    }
    return Record.model_validate({**found, "digest": _digest(found)})


def write_record(record: Record, folder: Path) -> Path:
    """Write it into `folder`, under a name of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", f"{record.name} {record.machine.gpu or record.machine.processor}".lower()).strip(
        "-"
    )
    path = folder / f"{slug}-{record.date:%Y%m%dT%H%M%SZ}-{record.digest[:6]}.json"
    path.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return path


def read_record(path: Path) -> Record:
    """One record.

    Raises:
        ConfigError: It is not one.
    """
    try:
        return Record.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # pydantic's own are ValueErrors
        where, said = "", str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            where, said = f"{place}: " * bool(place), first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{path} is no record: {where}{said}. Run what made it again.") from error


def read_records(folder: Path) -> list[Record]:
    """All of a folder, the oldest first."""
    return sorted((read_record(path) for path in folder.glob("**/*.json")), key=lambda record: record.date)


def hash_room(room: str) -> str:
    """SHA-256 of the sources of an importable package or module, with their paths in it.

    Raises:
        ConfigError: There is none of this name.
    """
    found = _hash_or_none(room)
    if found is None:
        raise ConfigError(
            f"{room}: no package of this name is here; a record names rooms such as still_export.runtime."
        )
    return found


def find_machine() -> Machine:
    """This one."""
    try:
        gpu: str | None = str(Driver().name)
    except (CudaError, OSError):
        gpu = None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return Machine(
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
    """The commit of the sources, "-dirty" behind it where tracked files differ; outside a clone what COMMIT says, or None."""
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


@cache
def _hash_or_none(room: str) -> str | None:
    place = SOURCE if room == PLUGINS else _place(room)
    if place is None or not place.exists():
        return None
    if place.is_file():
        return hashlib.sha256(place.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for path in sorted(place.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(place).as_posix()}\n{path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _place(room: str) -> Path | None:
    """The folder of a package, the file of a module."""
    try:
        spec = importlib.util.find_spec(room)
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _own_command() -> list[str]:
    """This process's words as another machine takes them: modules by name, places of this machine without their folders."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = "" if spec is None else spec.name.removesuffix(".__main__")
    own = ["still-export"] if module.startswith("still_export") else ["python", "-m", module]
    words = [re.sub(r"(^|=)(/[^/]+)*/(?=[^/])", r"\1", word) for word in sys.argv[1:]]
    return [*(own if module else [Path(sys.argv[0]).name]), *words]
