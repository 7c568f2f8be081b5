"""The report of `still-export inspect`: what a package holds, and where it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from still_export.doctor import Finding
from still_export.package.inspect import spans
from still_export.report.description import Cell, Lines, Plots, Report, Table

MIB = 2**20


def page(found: Mapping[str, Any], package: str, here: Sequence[Finding], machine: Mapping[str, str]) -> Report:
    """The page of a package.

    Args:
        found: What `inspect` found.
        here: Where it runs on this machine.
    """
    model, capacity = found["model"], found["capacity"]
    limit = f"{capacity['capacity_tokens']:,} tokens" + (
        "" if capacity["bounded"] else f", then {capacity['overflow']}"
    )
    sizes = {"this package": "state_bytes", "full attention": "full_attention_cache_bytes"}
    state = Lines(
        "State of one row",
        "context, tokens",
        "size, MiB",
        {name: [(row["tokens"], row[key] / MIB) for row in found["state"]] for name, key in sizes.items()},
        log_x=True,
        log_y=True,
    )
    kinds: list[list[Cell]] = [
        [
            kind["kind"].replace("_", " "),
            spans(kind["layers"]),
            len(kind["layers"]),
            kind["bytes_at_capacity"] / MIB,
            ", ".join(kind["states"]),
            ", ".join(kind["growing"]) or "none",
        ]
        for kind in found["layers"]
    ]
    runs = [["yes" if f.able else "no", f.what, f.detail, f.todo] for f in here]
    trained = (
        ""
        if model["linearized"]
        else " Its STILL attention is untrained: good for measuring speed, not for long inputs."
    )
    return Report(
        title=f"{package}: {model['family']}, {model['layers']} layers, {model['parameters'] / 1e6:,.1f} M parameters",
        verdict=f"For {found['target']}, {model['dtype']}; holds {limit}.{trained}",
        parts=[
            Table("What this machine can run it on", ["", "where", "with", "what to do"], runs),
            Plots("State by context length", [state]),
            Table("Layers", ["kind", "layers", "count", "state at capacity, MiB", "states", "of them grow"], kinds),
            Table("Precision", ["what", "type"], [list(pair) for pair in found["precision"].items()]),
            Table(
                "Operators of the graph",
                ["count", "operator"],
                [[n, name] for name, n in found["nodes"].items()],
                folded=True,
            ),
            Table(
                "Files",
                ["size, MiB", "file"],
                [[size / MIB, name] for name, size in found["files"].items()],
                folded=True,
            ),
        ],
        machine=machine,
        command=found["command"],
    )
