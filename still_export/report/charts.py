"""Plots as Vega-Lite specifications, made by Altair. Text and axes use the page's colours, so that both colour schemes fit."""

from __future__ import annotations

import math
from typing import Any

from still_export.report.description import Bars, Heatmap, Lines, Plot

HEIGHT = 230
"""Height of a plot, pixels. The page sets the width."""

PALETTE = ["#4c8dff", "#f0883e", "#3fb950", "#db61a2", "#a371f7", "#2bb3c0", "#c69026", "#8b949e"]
"""Legible on white and on near black, with a contrast of at least 2.5:1."""

NUMBERS = (
    "datum.value != 0 && abs(datum.value) < 1e-3 ? format(datum.value, '.0e')"
    " : format(datum.value, abs(datum.value) < 1e4 ? ',.6~g' : '~s')"
)
"""Format of numbers on axes, a Vega expression."""

LIMIT = "#e5534b"
FEW, LABELLED = 40, 6
"""Most points of a line that get marks, and most bars that get their value: more would overlap."""

FONT = "system-ui, sans-serif"


def specification(plot: Plot) -> dict[str, Any]:
    """The Vega-Lite specification of `plot`, as wide as its container."""
    drawn = _lines(plot) if isinstance(plot, Lines) else _bars(plot) if isinstance(plot, Bars) else _heatmap(plot)
    chart = drawn.properties(width="container", height=HEIGHT, background="transparent")
    text: dict[str, Any] = {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "labelFont": FONT,
        "titleFont": FONT,
    }
    text |= {"labelFontSize": 11, "titleFontSize": 12}
    lines = {"domainColor": "currentColor", "tickColor": "currentColor", "gridColor": "currentColor"}
    chart = chart.configure(autosize={"type": "fit-x", "contains": "padding"}, padding=4)
    chart = chart.configure_axis(**text, **lines, gridOpacity=0.12, domainOpacity=0.5, titleFontWeight="normal")
    chart = chart.configure_legend(**text, orient="bottom", columns=2, labelLimit=0, title=None)
    return dict(chart.configure_view(stroke=None).to_dict())


def _lines(plot: Lines) -> Any:
    import altair

    rows: list[dict[str, Any]] = [
        {"x": x, "y": y, "line": name}
        for name, points in plot.series.items()
        for x, y in points
        if not ((plot.log_x and x <= 0) or (plot.log_y and y <= 0))
    ]
    x_axis = altair.Axis(labelExpr=NUMBERS, tickCount=5, tickMinStep=1, labelOverlap=True)
    x_scale = altair.Scale(zero=False, nice=False)
    if plot.log_x:
        x_axis.values, x_scale = sorted({row["x"] for row in rows}), altair.Scale(type="log", nice=False)
    y_axis, y_scale = altair.Axis(labelExpr=NUMBERS, tickCount=6), altair.Scale(zero=plot.from_zero, nice=True)
    if plot.log_y:
        decades = _decades([row["y"] for row in rows] + list(plot.limits.values()))
        y_axis.values, y_scale = decades, altair.Scale(type="log", domain=[decades[0], decades[-1]])
    many = max((len(points) for points in plot.series.values()), default=0) > FEW
    names: list[Any] = list(plot.series)
    legend = altair.Undefined if len(names) > 1 else None
    encoding: dict[str, Any] = {
        "x": altair.X("x:Q", title=plot.x, scale=x_scale, axis=x_axis),
        "y": altair.Y("y:Q", title=plot.y, scale=y_scale, axis=y_axis),
        "color": altair.Color("line:N", scale=altair.Scale(domain=names, range=PALETTE), legend=legend),
        "tooltip": [
            altair.Tooltip("line:N", title="line"),
            altair.Tooltip("x:Q", title=plot.x, format=",.6~g"),
            altair.Tooltip("y:Q", title=plot.y, format=",.4~g"),
        ],
    }
    drawn: Any = altair.Chart(altair.Data(values=rows)).mark_line(point=not many).encode(**encoding)
    for name, value in plot.limits.items():
        limit = altair.Chart(altair.Data(values=[{"y": value, "limit": name}]))
        drawn += limit.mark_rule(strokeDash=[5, 4], color=LIMIT).encode(y="y:Q", tooltip=["limit:N", "y:Q"])
    return drawn


def _decades(values: list[float]) -> list[float]:
    powers = [math.log10(value) for value in values] or [0.0]
    return [
        10.0**n for n in range(math.floor(min(powers)), max(math.ceil(max(powers)), math.floor(min(powers)) + 1) + 1)
    ]


def _bars(plot: Bars) -> Any:
    import altair

    rows = [{"x": group, "bar": bar, "y": y} for group, bars in plot.groups.items() for bar, y in bars.items()]
    names: list[Any] = list(dict.fromkeys(row["bar"] for row in rows))
    legend = altair.Undefined if len(names) > 1 else None
    encoding: dict[str, Any] = {
        "x": altair.X(
            "x:N", title=plot.x, sort=None, axis=altair.Axis(labelAngle=0, labelExpr="split(datum.label, ' ')")
        ),
        "y": altair.Y("y:Q", title=plot.y, axis=altair.Axis(tickCount=5)),
        "xOffset": altair.XOffset("bar:N", sort=None),
        "tooltip": [altair.Tooltip("x:N", title=plot.x), "bar:N", altair.Tooltip("y:Q", title=plot.y, format=".4f")],
    }
    base = altair.Chart(altair.Data(values=rows))
    colour = altair.Color("bar:N", sort=None, scale=altair.Scale(domain=names, range=PALETTE), legend=legend)
    drawn: Any = base.mark_bar().encode(**encoding, color=colour)
    if len(rows) <= LABELLED:
        labels = base.mark_text(dy=-6, color="currentColor", fontSize=11)
        drawn += labels.encode(**encoding, text=altair.Text("y:Q", format=".4~g"))
    return drawn


def _heatmap(plot: Heatmap) -> Any:
    import altair

    rows = [{"x": x, "y": y, "value": value} for (x, y), value in plot.cells.items()]
    scale = altair.Scale(domain=[0, 1], scheme="viridis")
    encoding: dict[str, Any] = {
        "x": altair.X("x:O", title=plot.x, sort=None, axis=altair.Axis(labelAngle=0, labelOverlap=True)),
        "y": altair.Y("y:O", title=plot.y, sort=None),
        "tooltip": [
            altair.Tooltip("x:O", title=plot.x),
            altair.Tooltip("y:O", title=plot.y),
            altair.Tooltip("value:Q", title=plot.value, format=".0%"),
        ],
    }
    legend = altair.Legend(title=plot.value, format=".0%", orient="right", gradientLength=HEIGHT - 40, offset=6)
    cells = altair.Chart(altair.Data(values=rows)).mark_rect()
    return cells.encode(**encoding, color=altair.Color("value:Q", scale=scale, legend=legend))
