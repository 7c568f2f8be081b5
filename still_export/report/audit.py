"""The report of `still-export audit`: norms over layers, and how often each place of a chunk is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from still_export.mixers.base import Audit
from still_export.report.description import Heatmap, Lines, Plots, Report


def page(results: Sequence[Audit], model: str, machine: Mapping[str, str], command: str) -> Report:
    """The page of an audit."""
    parts = []
    for result in results:
        for name, profile in result.profiles().items():
            plots = [
                Lines(panel, "layer", f"mean of {name}", {line: list(enumerate(y)) for line, y in lines.items()})
                for panel, lines in profile.items()
            ]
            parts.append(Plots(name.replace("_", " "), plots))
        for name, counts in result.shares().items():
            parts.append(Plots(name.replace("_", " "), [_chosen(name.replace("_", " "), counts)]))
    passed = all(result.passed for result in results)
    return Report(
        title=f"{model}: what must hold",
        verdict="Everything that must hold holds." if passed else "A property that must hold does not.",
        passed=passed,
        findings=[line for result in results for line in result.lines()],
        parts=parts,
        machine=machine,
        command=command,
    )


def _chosen(name: str, counts: np.ndarray) -> Heatmap:
    """Of a layer's choices the share of each place, where the most chosen place of all layers is 1."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    shares = shares / max(float(shares.max()), 1e-9)
    cells = {(str(place), str(layer)): float(share) for (layer, place), share in np.ndenumerate(shares)}
    return Heatmap("Where choices fall", name, "layer", "of the most chosen", cells)
