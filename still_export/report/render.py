"""A report as one HTML file. Jinja2 fills the page and Vega-Lite draws; scripts and styles are embedded."""

from __future__ import annotations

import datetime
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from still_export.errors import ConfigError
from still_export.extras import EXTRAS, demand
from still_export.package.staging import write_whole
from still_export.report.charts import specification
from still_export.report.description import Plots, Report
from still_export.version import __version__


def check_report(path: Path) -> None:
    """Check before the work begins that `write_report` can write `path`.

    Raises:
        ConfigError: It does not name an HTML file, or its folder cannot be written.
        ModuleNotFoundError: A plotting library is missing.
    """
    demand(*EXTRAS["report"])
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise ConfigError(f"--report {path}: give the name of an HTML file, such as report.html.")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--report {path}: the folder {path.parent} does not exist or cannot be written.")


def write_report(report: Report, path: Path) -> None:
    """Write `report` to the file `path`, replacing it."""
    write_whole(path, render(report))


def render(report: Report) -> str:
    """The page, about 1 MB, nearly all of it the plotting library."""
    import jinja2
    import vl_convert

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["number"] = number
    environment.tests["numeric"] = lambda cell: isinstance(cell, int | float)
    environment.tests["plots"] = lambda part: isinstance(part, Plots)
    page = environment.from_string(files("still_export.report").joinpath("page.html").read_text(encoding="utf-8"))
    charts = [specification(plot) for part in report.parts if isinstance(part, Plots) for plot in part.plots]
    return page.render(
        report=report,
        charts=charts,
        library=vl_convert.javascript_bundle() if charts else "",  # type: ignore[call-arg]
        version=__version__,
        written=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )


def number(cell: Any) -> str:
    """Text of a cell: integers with commas, other numbers with four significant digits."""
    if cell is None:
        return ""
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        return str(cell)
    if isinstance(cell, int):
        return f"{cell:,}"
    if cell == 0:
        return "0"
    return f"{cell:.1e}" if abs(cell) < 1e-3 else f"{cell:,.4g}" if abs(cell) < 1e4 else f"{cell:,.0f}"
