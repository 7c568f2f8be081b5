"""The report of `still-export inspect`: content of a package, and where it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from still_export.doctor import Finding
from still_export.package.inspect import spans
from still_export.report.description import Cell, Lines, Plots, Report, Table, plain


def page(
    found: Mapping[str, Any],
    summary: Mapping[str, str],
    package: str,
    here: Sequence[Finding],
    machine: Mapping[str, str],
) -> Report:
    """The page of a package."""
    state = Lines.of_state("State of one row", "this package", found["state"])
    kinds: list[list[Cell]] = [
        [
            plain(kind["kind"]),
            spans(kind["layers"]),
            len(kind["layers"]),
            kind["bytes_at_capacity"] / 1e6,
            ", ".join(map(plain, kind["states"])),
            ", ".join(map(plain, kind["growing"])) or "none",
        ]
        for kind in found["layers"]
    ]
    runs = [["yes" if f.able else "no", f.what, f.detail, f.todo] for f in here]
    trained = (
        ""
        if found["model"]["linearized"]
        else " Its STILL attention is untrained: good for measuring speed, not for long inputs."
    )
    return Report(
        title=f"{package}: {summary['what']}",
        verdict=f"Holds {summary['length']}; {summary['size']}.{trained}",
        findings=[f"Speed: {summary['speed']}."],
        parts=[
            Table("Runtimes on this machine", ["", "where", "with", "what to do"], runs),
            Plots("State by context length", [state]),
            Table("Layers", ["kind", "layers", "count", "state at capacity, MB", "states", "of them grow"], kinds),
            Table("Precision", ["what", "type"], [[what, plain(kind)] for what, kind in found["precision"].items()]),
            Table(
                "Operators of the graph",
                ["count", "operator"],
                [[n, name] for name, n in found["nodes"].items()],
                folded=True,
            ),
            Table(
                "Files",
                ["size, MB", "file"],
                [[size / 1e6, name] for name, size in found["files"].items()],
                folded=True,
            ),
        ],
        machine=machine,
        command=found["command"],
    )
