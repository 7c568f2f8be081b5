"""The report of `still-export evaluate`: bits per byte, retrieval by depth and length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from still_export.evaluation.bench import BUSY
from still_export.evaluation.intervals import share
from still_export.evaluation.packages import OTHERS, SPREAD
from still_export.report.description import (
    Bars,
    Cell,
    Heatmap,
    Lines,
    Plots,
    Report,
    Table,
    percent_more,
    plain,
    reference_of,
)

COSTS = (
    "One row, measured in a process of its own; times are medians of rounds. Times of a machine of which other programs used more than "
    f"{BUSY:.0%} are not plotted: they do not tell the speed."
)
FEWEST = 3
"""Least points of a plot; fewer are shown as a table only."""


def page(content: Mapping[str, Any], model: str, depths: int, machine: Mapping[str, str], command: str) -> Report:
    """The page of an evaluation.

    Args:
        content: bits_per_byte, perplexity, retrieval and costs by variant, and prompts (evaluation.json).
    """
    bits, found = content["bits_per_byte"], content["retrieval"]
    parts: list[Table | Plots] = [_table(bits, found, content["prompts"])]
    if costs := content["costs"]:
        columns = list(next(iter(costs.values())))
        rows: list[list[Cell]] = [[name, *(row[c] for c in columns)] for name, row in costs.items()]
        parts.append(Table("Size, memory and speed", ["package", *columns], rows, COSTS))
        if plots := list(_trades(costs, _qualities(bits, found))):
            parts.append(Plots("Quality over cost", plots))
    if bars := Bars.of_changes("Bits per byte", "text @ context, tokens", bits):
        parts.append(Plots("Text", bars))
    for text in next(iter(content["perplexity"].values()), {}):
        by_range = {variant: row[text] for variant, row in content["perplexity"].items()}
        if bars := Bars.of_changes("Perplexity", "positions", by_range):
            parts.append(Plots(f"{text} by position", bars))
    for task in next(iter(found.values()), {}):
        maps = [_heatmap(variant, rows[task], depths) for variant, rows in found.items()]
        parts.append(Plots(f"Retrieval: {plain(task)}", maps))
    return Report(
        title=f"{model}: what it knows",
        verdict=_verdict(bits, found),
        parts=parts,
        machine=machine,
        command=command,
    )


def _qualities(bits: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Quality measures to plot, by variant: bits per byte of each text, accuracy of each task over all lengths."""
    return {
        variant: {f"bits/byte, {text}": value for text, value in bits.get(variant, {}).items()}
        | {f"{plain(task)}: right": _mean(rows) for task, rows in found.get(variant, {}).items() if rows}
        for variant in dict.fromkeys([*bits, *found])
    }


def _trades(costs: Mapping[str, Mapping[str, float]], qualities: Mapping[str, Mapping[str, float]]) -> Iterator[Lines]:
    """Plots of quality over cost with a point per package, one for each pair of measures."""
    both = [name for name in costs if qualities.get(name)]
    if len(both) < FEWEST:
        return  # the table shows them
    for measure in next((qualities[name] for name in both), {}):
        busy = any(costs[name].get(OTHERS, 0.0) > 100 * BUSY for name in both)
        for cost in costs[both[0]]:
            if cost in (OTHERS, SPREAD) or (busy and cost.endswith((", s", ", ms"))):
                continue
            series = {name: [(costs[name][cost], qualities[name][measure])] for name in both}
            yield Lines(f"{measure} over {cost}", cost, measure, series, from_zero=False)


def _mean(by_length: Mapping[Any, list[float]]) -> float:
    values = [value for row in by_length.values() for value in row]
    return sum(values) / len(values)


def _verdict(bits: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The model in one line, compared with the teacher if there is one; or every package, with the first."""
    lines, names = [], list(dict.fromkeys([*bits, *found]))
    reference = reference_of(names) if names else ""
    for variant in [v for v in ("still", "teacher") if v in names] if "still" in names else names:
        values, base = ([*bits.get(name, {}).values()] for name in (variant, reference))
        other = variant != reference
        measured = []
        if values:
            by = f" ({percent_more(sum(values), sum(base)):+.1f}%)" if other and len(base) == len(values) else ""
            measured.append(f"{sum(values) / len(values):.4f} bits per byte{by}")
        for task, rows in found.get(variant, {}).items():
            whole = _mean(found[reference][task]) if other and task in found.get(reference, {}) else 0.0
            measured.append(
                f"{plain(task)} {_mean(rows):.0%}" + (f" ({_mean(rows) / whole:.0%} of it)" if whole else "")
            )
        lines.append(f"{plain(variant)}: {', '.join(measured)}")
    against = f" In brackets: against {plain(reference)}." if len(lines) > 1 else ""
    return "; ".join(lines) + "." + against if lines else "Nothing was measured."


def _table(bits: Mapping[str, Any], found: Mapping[str, Any], prompts: int) -> Table:
    variants = list(dict.fromkeys([*bits, *found]))
    texts = list(next(iter(bits.values()), {}))
    cells = [(task, length) for task, rows in next(iter(found.values()), {}).items() for length in rows]
    rows: list[list[Cell]] = [
        [
            plain(variant),
            *(bits[variant][text] for text in texts),
            *(share(_mean({0: found[variant][task][length]}), prompts) for task, length in cells),
        ]
        for variant in variants
    ]
    columns = [
        "model",
        *(f"bits/byte, {t}" for t in texts),
        *(f"{plain(t)}, {n}" for t, n in cells),
    ]
    note = f"Retrieval: share of right answers to {prompts} prompts of a length in tokens, with its 95% confidence interval."
    return Table("Results", columns, rows, note if cells else "")


def _heatmap(variant: str, rows: Mapping[Any, list[float]], depths: int) -> Heatmap:
    places = [f"{depth / max(1, depths - 1):.2g}" for depth in range(depths)]
    cells = {
        (str(length), place): value for length, row in rows.items() for place, value in zip(places, row, strict=True)
    }
    title = f"{plain(variant)}: {_mean(rows):.0%}"
    return Heatmap(title, "prompt, tokens", "depth (0 = far)", "right", cells)
