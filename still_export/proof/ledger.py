"""The ledger: records of a folder as one table, the newest of each, with those marked whose sources changed since."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from still_export.proof.records import Record

AT_LENGTH = re.compile(r"_at_\d+$")
HEAD = ("what", "target", "type", "verdict", "showed", "machine", "date", "commit", "sources")
SUBJECT = ("package", "family", "target", "dtype", "quantize", "provider")
"""Parts of a subject that have a column, or stand behind the name."""


def newest(records: Iterable[Record]) -> list[Record]:
    """Of records that show the same on the same kind of machine the newest, in the order of their names."""
    kept: dict[tuple[object, ...], Record] = {}
    for record in sorted(records, key=lambda each: each.date):
        machine = record.machine.gpu or record.machine.processor
        kept[record.kind, record.name, tuple(sorted(record.subject.items())), machine] = record
    return [kept[key] for key in sorted(kept, key=str)]


def table(records: Iterable[Record]) -> str:
    """Markdown: a row for each of the newest records; one whose sources are others now is stale."""
    rows = [HEAD, ("---",) * len(HEAD), *(_row(record) for record in newest(records))]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(record: Record) -> tuple[str, ...]:
    subject = record.subject
    rest = [f"{name} {value}" for name, value in subject.items() if name not in SUBJECT]
    what = ", ".join([subject.get("package", record.name), *rest])
    target = " on ".join(filter(None, [subject.get("target", ""), subject.get("provider", "")]))
    dtype = " ".join(filter(None, [subject.get("quantize", ""), subject.get("dtype", "")]))
    machine = record.machine.gpu or f"{record.machine.processor}, {record.machine.cores} cores"
    told = {
        name: value for name, value in record.figures.items() if not AT_LENGTH.search(name)
    }  # the others have a table
    cells = (what, target, dtype, record.verdict, figures(told), machine)
    return (
        *(cell.replace("|", "\\|") for cell in cells),
        f"{record.date:%Y-%m-%d}",
        commit_of(record),
        sources_of([record]),
    )


def sources_of(records: Iterable[Record]) -> str:
    """What pages say of the sources that were run. Which rooms changed is told by `python -m tools.ledger`: pages would be other ones after
    every change of a stale room."""
    return "**stale**" if any(record.stale_rooms() for record in records) else "as they are"


def commit_of(record: Record) -> str:
    """A copy of the sources without its history has none."""
    return f"`{record.commit[:12]}`" if record.commit else "no commit"


def figures(found: dict[str, Any]) -> str:
    """Numbers and words of a record in a line; lists, which have pages of their own, are left out."""
    shown = {name: value for name, value in found.items() if isinstance(value, int | float | str)}
    return ", ".join(f"{name.replace('_', ' ')} {_short(value)}" for name, value in shown.items())


def _short(value: float | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
