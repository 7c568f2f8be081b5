"""The report of `still-export verify`: verdict, first failures, errors by case and by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from still_export.report.description import Lines, Plots, Report, Table

MOST = 1e6
"""Largest plotted error in multiples of its bound; infinity cannot be drawn."""
BAR = 20
"""Characters of a bar of the whole bound."""
FIRST = 5
"""Mismatches listed above the tables."""


def page(content: Mapping[str, Any], runtime: str, package: str, machine: Mapping[str, str], command: str) -> Report:
    outputs = content["outputs"]
    failed = sorted((e for e in outputs if not e["passed"]), key=lambda e: -_share(e))
    findings = [f"{check['name']}: {check['what']}" for check in content["checks"] if not check["passed"]]
    layer = content["first_diverging_layer"]
    if layer is not None:
        findings.append(f"First diverging layer: {layer}.")
    findings += [
        f"{e['run']}, {e['case']}, {e['output']}: row {list(e['worst_place'])} is {e['worst']:.1e} off in call {e['worst_call']}, "
        f"bound {e['bound']:.1e}."
        for e in failed[:FIRST]
    ]
    if len(failed) > FIRST:
        findings.append(f"... and {len(failed) - FIRST} more outputs.")
    chosen = content["selections"]
    if chosen["wrong"]:
        findings.append(f"{chosen['wrong']} selections differ without a near tie.")
    passed = content["passed"]
    findings += [f"Not asked: {line}." for line in content["not_asked"]]
    if (nearest := content["nearest"]) is not None:
        share = f"{min(nearest['share'], MOST):.0%} of its bound"
        findings.append(f"Nearest to its bound: {nearest['run']}, {nearest['case']}, {nearest['output']}, {share}.")
    return Report(
        title=f"{package}: PyTorch against {runtime}",
        verdict="PASSED: the package computes what PyTorch computes." if passed else f"{content['verdict']}.",
        passed=passed,
        findings=findings,
        parts=[
            _cases(outputs),
            *([] if passed else [Plots("Error by layer, as a multiple of its bound", _by_layer(outputs))]),
            _facts(content),
            _all(outputs),
        ],
        machine=machine,
        command=command,
    )


def _share(entry: Mapping[str, Any]) -> float:
    """The judged error as a multiple of its bound."""
    return min(entry["worst"] / entry["bound"], MOST) if entry["bound"] else 0.0


def _cases(outputs: list[dict[str, Any]]) -> Table:
    cases: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for entry in outputs:
        cases[entry["run"], entry["case"]].append(entry)
    rows, failed = [], []
    for number, ((run, case), entries) in enumerate(cases.items()):
        worst = max(entries, key=_share)
        good = all(e["passed"] for e in entries)
        failed += [] if good else [number]
        share = _share(worst)
        bar = "\u2588" * max(1, min(BAR, round(BAR * share)))
        rows.append([run, case, "ok" if good else "MISMATCH", bar, f"{share:.0%}", worst["output"], worst["max_abs"]])
    columns = ["run", "case", "", "share of the bound", "", "of which output", "largest error"]
    return Table("Cases", columns, rows, "The output of each case that is nearest to its bound.", frozenset(failed))


def _by_layer(outputs: list[dict[str, Any]]) -> list[Lines]:
    """For each kind of state the judged error of each layer as a multiple of its bound, the largest over all cases."""
    worst: dict[str, dict[int, float]] = defaultdict(dict)
    for entry in outputs:
        name, _, layer = entry["output"].removeprefix("present_").rpartition(".")
        if layer.isdigit():
            worst[name][int(layer)] = max(worst[name].get(int(layer), 0.0), _share(entry))
    return [
        Lines(
            name.replace("_", " "),
            "layer",
            "error as a multiple of its bound",
            {"largest over all cases": sorted(layers.items())},
            log_y=True,
            limits={"bound": 1.0},
            note="Dashed: the bound." + ("" if any(layers.values()) else " There is no error at all."),
        )
        for name, layers in worst.items()
    ]


def _facts(content: Mapping[str, Any]) -> Table:
    chosen = content["selections"]
    rows: list[list[Any]] = [
        ["top-1 agreement of the logits", f"{content['top1_agreement']:.4f}"],
        ["top-1 agreement of PyTorch's own run in the package's type", f"{content['pytorch_top1_agreement']:.4f}"],
        ["selections compared", f"{chosen['compared']:,}"],
        ["of them differ by a near tie", f"{chosen['near_ties']:,} (rounding turns some {chosen['expected']:.1f})"],
        ["of them differ without one", f"{chosen['wrong']:,}"],
        *([check["name"], "yes" if check["passed"] else f"NO: {check['what']}"] for check in content["checks"]),
    ]
    rows += [["asked", line] for line in content["asked"]]
    if loss := content.get("quantization_loss"):
        rows += [[f"quantization loss: {name.replace('_', ' ')}", value] for name, value in loss.items()]
    return Table("Agreement", ["what", "value"], rows)


def _all(outputs: list[dict[str, Any]]) -> Table:
    names = ("max_abs", "mean_abs", "bound")
    rows = [
        [e["run"], e["case"], e["output"], "ok" if e["passed"] else "MISMATCH", *(e[name] for name in names)]
        for e in outputs
    ]
    failed = frozenset(number for number, entry in enumerate(outputs) if not entry["passed"])
    columns = ["run", "case", "output", "", "max", "mean", "allowed"]
    return Table("Every output", columns, rows, failed=failed, folded=True)
