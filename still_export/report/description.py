"""The content of a report without its layout: verdict, tables, plots. Verbs make it, `render` draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Cell = str | int | float | None
Points = Sequence[tuple[float, float]]


def plain(name: str) -> str:
    """A state's, layer's or task's name as words."""
    return name.replace("_", " ")


@dataclass(frozen=True)
class Table:
    """Rows under named columns.

    Args:
        columns: Titles, with units.
        rows: Text or numbers; None is an empty cell.
        failed: Indices of rows that are mismatches.
        folded: Collapsed until the reader opens it.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    failed: frozenset[int] = frozenset()
    folded: bool = False


@dataclass(frozen=True)
class Lines:
    """Lines in one plot.

    Args:
        x, y: Titles of the axes, with units.
        series: Points of each line, by name.
        log_x, log_y: Logarithmic axes, which show positive numbers only.
        from_zero: Whether a linear y axis begins at 0.
        limits: Dashed horizontal lines, by name.
    """

    title: str
    x: str
    y: str
    series: Mapping[str, Points]
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = True
    limits: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @classmethod
    def of_state(cls, title: str, name: str, sizes: Sequence[Mapping[str, int]]) -> Lines:
        """Sizes of the state and of full attention's cache by context, from `package.inspect.state_sizes`."""
        keys = {name: "state_bytes", "full attention's cache": "full_attention_cache_bytes"}
        series = {line: [(row["tokens"], row[key] / 1e6) for row in sizes] for line, key in keys.items()}
        return cls(title, "context, tokens", "size, MB", series, log_x=True, log_y=True)


@dataclass(frozen=True)
class Bars:
    """Groups of bars: group -> bar -> value."""

    title: str
    x: str
    y: str
    groups: Mapping[str, Mapping[str, float]]
    note: str = ""


@dataclass(frozen=True)
class Heatmap:
    """Shares between 0 and 1: (x, y) -> value."""

    title: str
    x: str
    y: str
    value: str
    cells: Mapping[tuple[str, str], float]
    note: str = ""


Plot = Lines | Bars | Heatmap


@dataclass(frozen=True)
class Plots:
    """Plots in a row, as many as fit the width of the page."""

    title: str
    plots: Sequence[Plot]


@dataclass(frozen=True)
class Report:
    """A page.

    Args:
        passed: None: there is no verdict.
        findings: What failed first, or what to know before reading the numbers.
    """

    title: str
    verdict: str
    parts: Sequence[Table | Plots]
    machine: Mapping[str, str]
    command: str
    passed: bool | None = None
    findings: Sequence[str] = ()
