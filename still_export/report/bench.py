"""The report of `still-export bench`: time and memory by context length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from still_export.report.description import Lines, Plots, Report, Table

MEASURES = {
    "prefill_s": ("Reading the prompt", "time, s"),
    "decode_ms": ("One more token", "time, ms"),
    "peak_mb": ("Memory", "peak, MB"),
}


def page(content: Mapping[str, Any], left_out: str, machine: Mapping[str, str], command: str) -> Report:
    """The page of a measurement.

    Args:
        left_out: Lengths that were not measured, with the reason; "": none.
    """
    series = {"still-export": content["rows"], **({"the other": content["beside"]} if content["beside"] else {})}
    last = content["rows"][-1] if content["rows"] else None
    threads = content["threads"] or "the runtime's choice of"
    where = f"{content['runtime']}, {content['provider']}, {threads} threads, batch {content['batch']}"
    rows = [
        [
            name,
            row["length"],
            row["prefill_s"],
            row["length"] * row["batch"] / row["prefill_s"],
            row["decode_ms"],
            1000 * row["batch"] / row["decode_ms"],
            row["peak_mb"],
            row.get("state_mb", 0.0),
        ]
        for name, entries in series.items()
        for row in entries
    ]
    columns = [
        "runtime",
        "context, tokens",
        "prefill, s",
        "tokens/s",
        "decode, ms a token",
        "tokens/s",
        "peak, MB",
        "state, MB",
    ]
    plots = [
        Lines(
            title,
            "context, tokens",
            unit,
            {n: [(r["length"], r[key]) for r in entries] for n, entries in series.items()},
        )
        for key, (title, unit) in MEASURES.items()
    ]
    state = Lines.of_state("Size of the state", "the state", content["state"])
    return Report(
        title=f"{content['package']}: speed and memory",
        verdict=f"{last['decode_ms']:.1f} ms a token after {last['length']:,} tokens, {last['peak_mb']:,.0f} MB at the peak ({where})."
        if last
        else "Nothing was measured.",
        findings=[left_out] if left_out else [],
        parts=[Plots("By context length", [*plots, state]), Table("Measurements", columns, rows)],
        machine=machine,
        command=command,
    )
