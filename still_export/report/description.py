"""The content of a report without its layout: verdict, tables, plots. Verbs make it, `render` draws it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Cell = str | int | float | None
Points = Sequence[tuple[float, float]]


def plain(name: str) -> str:
    """A state's, layer's or task's name as words."""
    return name.replace("_", " ")


def reference_of(models: Iterable[str]) -> str:
    """The one of several models, of which there is one at least, that the others are compared with: the teacher, else the first."""
    names = list(models)
    return "teacher" if "teacher" in names else names[0]


def percent_more(value: float, reference: float) -> float:
    return 100 * (value / reference - 1)


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

    @classmethod
    def of_changes(cls, what: str, x: str, values: Mapping[str, Mapping[str, float]]) -> list[Bars]:
        """One plot of how much more than the reference the others have, in percent: levels a few percent apart would look alike.

        Args:
            values: Model -> group -> value, of which less is better. One model has nothing to be compared with: no plot.
        """
        if len(values) < 2:
            return []
        reference = reference_of(values)
        groups = {
            group: {plain(name): percent_more(row[group], base) for name, row in values.items() if name != reference}
            for group, base in values[reference].items()
        }
        return [cls(f"{what} against {plain(reference)}: less is better", x, "more than it, %", groups)]


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
