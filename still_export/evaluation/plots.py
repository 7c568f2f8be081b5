"""Plots of evaluations and audits, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def _figure(columns: int, rows: int, width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def retrieval(rows: Mapping[str, Mapping[int, Sequence[float]]], task: str, path: Path) -> None:
    """Heatmaps of accuracy, one per variant: lengths from left to right, depths from top (far) to bottom (near)."""
    figure, axes = _figure(len(rows), 1, 2.2 * len(rows) + 1, 3.2)
    image = None
    for axis, (variant, by_length) in zip(axes[0], rows.items(), strict=True):
        values = np.array(list(by_length.values())).T  # [depths, lengths]
        image = axis.imshow(values, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axis.set_title(f"{variant.replace('_', ' ')}\n{values.mean():.0%}", fontsize=8)
        axis.set_xticks(range(len(by_length)), [str(n) for n in by_length], fontsize=7, rotation=45)
        depths = values.shape[0]
        axis.set_yticks([0, depths - 1], ["0", "1"] if depths > 1 else ["0", "0"], fontsize=7)
        axis.set_xlabel("tokens", fontsize=8)
    axes[0][0].set_ylabel("depth of the fact", fontsize=8)
    figure.colorbar(image, ax=axes[0], label=f"{task.replace('_', ' ')}: answers right")
    figure.savefig(path, dpi=120)


def bits_per_byte(values: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Bars: bits per byte of every variant, grouped by text and context."""
    figure, axes = _figure(1, 1, 7, 3.2)
    axis = axes[0][0]
    names = list(next(iter(values.values())))
    width = 0.8 / len(values)
    for index, (variant, row) in enumerate(values.items()):
        axis.bar(np.arange(len(names)) + index * width, list(row.values()), width, label=variant.replace("_", " "))
    axis.set_xticks(np.arange(len(names)) + 0.4 - width / 2, names, fontsize=8)
    axis.set_ylabel("bits per byte")
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def perplexity(values: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """Lines over ranges of positions, a panel per text: variant -> file -> range -> perplexity."""
    files = list(next(iter(values.values())))
    figure, axes = _figure(len(files), 1, 4.5 * len(files), 3.2)
    for axis, file in zip(axes[0], files, strict=True):
        for variant, row in values.items():
            axis.plot(list(row[file]), list(row[file].values()), "-o", markersize=4, label=variant.replace("_", " "))
        axis.set_title(file, fontsize=9)
        axis.set_xlabel("positions", fontsize=8)
        axis.tick_params(axis="x", labelsize=7, rotation=45)
        axis.set_yscale("log")
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("perplexity")
    figure.savefig(path, dpi=120)


def costs(values: Mapping[str, Mapping[str, float]], qualities: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Quality over cost, a point for each package: a panel for every pair of the two."""
    prices, measures = list(next(iter(values.values()))), list(next(iter(qualities.values())))
    figure, axes = _figure(len(prices), len(measures), 2.8 * len(prices), 2.6 * len(measures))
    for row, measure in zip(axes, measures, strict=True):
        for axis, price in zip(row, prices, strict=True):
            for name, costed in values.items():
                axis.plot(costed[price], qualities[name][measure], "o", label=name)
            axis.set(xlabel=price, xlim=(0, None))
            axis.grid(alpha=0.3)
        row[0].set_ylabel(measure)
    axes[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def profile(panels: Mapping[str, Mapping[str, Sequence[float]]], label: str, path: Path) -> None:
    """Lines over layers, side by side by panel: panel -> line -> value of each layer."""
    figure, axes = _figure(len(panels), 1, 4 * len(panels), 3)
    for axis, (panel, lines) in zip(axes[0], panels.items(), strict=True):
        for name, (values, style) in zip(lines, zip(lines.values(), ("-o", "--x", ":s"), strict=False), strict=False):
            axis.plot(values, style, label=name, markersize=4)
        axis.set_title(panel, fontsize=9)
        axis.set_xlabel("layer", fontsize=8)
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel(label)
    figure.savefig(path, dpi=120)


def shares(counts: np.ndarray, label: str, path: Path) -> None:
    """How often each place is chosen, [layers, places]; white is a uniform choice."""
    figure, axes = _figure(1, 1, 7, 3)
    uniform = counts.mean(1, keepdims=True)
    image = axes[0][0].imshow(counts / np.maximum(uniform, 1e-9), cmap="coolwarm", vmin=0, vmax=2, aspect="auto")
    axes[0][0].set_xlabel(label, fontsize=8)
    axes[0][0].set_ylabel("layer", fontsize=8)
    figure.colorbar(image, ax=axes[0][0], label="relative to uniform")
    figure.savefig(path, dpi=120)
