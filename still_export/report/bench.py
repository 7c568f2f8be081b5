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

NOTE = "Each figure is the median of its rounds; ± is half of their range, relative to it."


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def page(content: Mapping[str, Any], left_out: str, machine: Mapping[str, str], command: str) -> Report:
    """The page of a measurement.

    Args:
        left_out: Lengths that were not measured, with the reason; "": none.
    """
    series = {"still-export": content["rows"], **({"the other": content["beside"]} if content["beside"] else {})}
    last = content["rows"][-1] if content["rows"] else None
    threads = content["threads"] or "the runtime's choice"
    where = f"{content['runtime']}, {content['provider']}, threads: {threads}, batch {content['batch']}"
    rows = [
        [
            name,
            row["length"],
            row["prefill_s"],
            _percent(row.get("prefill_spread")),
            row["length"] * row["batch"] / row["prefill_s"],
            row["decode_ms"],
            _percent(row.get("decode_spread")),
            1000 * row["batch"] / row["decode_ms"],
            row["peak_mb"],
            row.get("state_mb", 0.0),
            row.get("rounds", 1),
            row.get("others_cores"),
        ]
        for name, entries in series.items()
        for row in entries
    ]
    columns = [
        "runtime",
        "context, tokens",
        "prefill, s",
        "±",
        "tokens/s",
        "decode, ms a token",
        "±",
        "tokens/s",
        "peak, MB",
        "state, MB",
        "rounds",
        "other programs, processors",
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
    if not last:
        verdict = "Nothing was measured."
    elif content["busy"]:
        verdict = f"Measured while the machine was busy: measure again when it is idle ({where})."
    else:
        verdict = f"{last['decode_ms']:.1f} ms a token after {last['length']:,} tokens, "
        verdict += f"{last['peak_mb']:,.0f} MB at the peak ({where})."
    return Report(
        title=f"{content['package']}: speed and memory",
        verdict=verdict,
        findings=[f"{content['load']}.", *([left_out] if left_out else [])],
        parts=[Plots("By context length", [*plots, state]), Table("Measurements", columns, rows, NOTE)],
        machine=machine,
        command=command,
    )
