"""The newest verdicts, a row for each target, machine, subject and type, in docs/reference/verdicts.json; and which of them are old.

  python -m tools.verdicts [--old]                                print the rows, or those that are old
  python -m tools.verdicts RECORD ... [--archive records.tar.gz]  take in what runs wrote, and keep the records themselves in the archive

A row is old where today's judge is another one (PROOF_VERSION). Its `ran` says which graph, archive of kernels and plan of an engine it is
about: an export whose hashes differ was not proven by it. Records are too many for the sources: the archive is an asset of a release.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from still_export.errors import ConfigError
from still_export.proof.constants import PROOF_VERSION
from still_export.proof.records import Record, make_record

VERDICTS = Path(__file__).resolve().parents[1] / "docs/reference/verdicts.json"
KEY = ("target", "machine", "subject", "type")
SHORT = 12
"""Letters of a hash that a row keeps."""
RUNTIMES = {
    "onnx": "onnxruntime",
    "ort": "onnxruntime",
    "genai": "onnxruntime-genai",
    "trt": "tensorrt",
    "vllm": "vllm",
}

Row = dict[str, Any]


def sum_up(name: str, parts: Sequence[Record]) -> Record:
    """One record of a run that proved several packages or asked several checks: `rows` has each, `failed` the names of those that failed,
    its subject is what they share."""
    margins = [m for part in parts if isinstance(m := part.figures.get("worst_of_its_bound"), int | float)]
    failed: list[Any] = [part.name for part in parts if part.verdict == "failed"]
    rows = [part.model_dump(mode="json", include={"name", "subject", "verdict", "figures", "ran"}) for part in parts]
    figures = {"checks": len(parts), "failed": failed, "rows": rows}
    if margins:
        figures["worst_of_its_bound"] = max(margins)
    subject = dict(set.intersection(*(set(part.subject.items()) for part in parts)))
    versions = {kind: version for part in parts for kind, version in part.versions.items()}
    return make_record("proof", name, subject, figures, {}, not failed, parts[0].seed, versions=versions)


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
        raise ConfigError(f"{path} is no record: {where}{said}. Make it again: still-export prove DIR") from error


def read_records(folder: Path) -> list[Record]:
    """All of a folder, the oldest first."""
    return sorted((read_record(path) for path in folder.glob("**/*.json")), key=lambda record: record.date)


def row_of(records: Sequence[Record]) -> Row:
    """The row of records of one run that share target, machine, subject and type."""
    last = max(records, key=lambda record: record.date)
    margins = [m for r in records if isinstance(m := r.figures.get("worst_of_its_bound"), int | float)]
    files = last.ran if len(records) == 1 else {}
    version = next(
        (f"{n} {v}" for k, n in RUNTIMES.items() if _target(last).startswith(k) and (v := last.versions.get(n))), ""
    )
    return {
        **dict(zip(KEY, key_of(last), strict=True)),
        "verdict": "failed" if any(record.verdict == "failed" for record in records) else "passed",
        "checks": sum(int(record.figures.get("checks", 1)) for record in records),  # type: ignore[arg-type]
        "margin": max(margins, default=None),
        "runtime": version,
        "judge": last.judge,
        "ran": {part: digest[:SHORT] for part, digest in files.items()},
        "command": last.command,
        "date": f"{last.date:%Y-%m-%d}",
        "commit": last.commit,
    }  # fmt: skip


def key_of(record: Record) -> tuple[str, ...]:
    """Target, kind of machine, what was proven, type."""
    subject = record.subject
    kind = " ".join(filter(None, [subject.get("quantize"), subject.get("dtype")]))
    return _target(record), record.machine.kind, record.name, kind


def _target(record: Record) -> str:
    subject = record.subject
    name = subject.get("target") or subject.get("runtime") or "kernels"
    if name in ("onnx", "ort-cpu", "ort-cuda"):
        return f"ort-{subject.get('provider', 'cpu')}"
    return "trt8" if name == "trt" and record.versions.get("tensorrt", "").startswith("8.") else name


def taken_in(rows: Iterable[Row], records: Iterable[Record]) -> list[Row]:
    """Rows with those of newer proofs in their place."""
    found = {tuple(row[name] for name in KEY): row for row in rows}
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        if record.kind == "proof":
            groups.setdefault(key_of(record), []).append(record)
    for key, group in groups.items():
        row = row_of(group)
        if key not in found or found[key]["date"] <= row["date"]:
            found[key] = row
    return [found[key] for key in sorted(found)]


def state_of(row: Row) -> str:
    """current, old, or unknown."""
    if row["judge"] is None:
        return "unknown: the run did not name its judge"
    return "current" if row["judge"] == PROOF_VERSION else "old: judge"


def read_rows(path: Path) -> list[Row]:
    """The rows of the file."""
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """A line each."""
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")


def add_to(archive: Path, paths: Iterable[Path]) -> None:
    """Keep files in a .tar.gz beside those that it has."""
    held: dict[str, bytes] = {}
    if archive.exists():
        with tarfile.open(archive) as old:
            held = {member.name: file.read() for member in old if (file := old.extractfile(member))}
    held |= {path.name: path.read_bytes() for path in paths}
    with tarfile.open(archive, "w:gz") as new:
        for name, content in sorted(held.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            new.addfile(entry, io.BytesIO(content))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", type=Path)
    parser.add_argument("--archive", type=Path)
    parser.add_argument("--old", action="store_true", help="print the rows that are old alone")
    options = parser.parse_args(arguments)
    try:
        rows = taken_in(read_rows(VERDICTS), map(read_record, options.records))
    except ConfigError as error:
        parser.error(str(error))
    if options.records:
        write_rows(VERDICTS, rows)
        if options.archive:
            add_to(options.archive, options.records)
    for row in rows:
        state = state_of(row)
        if options.old and not state.startswith("old"):
            continue
        margin = "" if row["margin"] is None else f", {row['margin']} of the bound"
        print(*(row[name] for name in KEY if row[name]), sep=", ", end=": ")
        print(f"{row['verdict']} ({row['checks']} checks{margin}), {row['date']}; {state}")


if __name__ == "__main__":
    main()
