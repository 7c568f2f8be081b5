"""README's picture has the figures of the notebook's table."""

import pytest

from tests.docs.pages import README, links
from tools.picture import FIGURES, PAGE, PICTURE, ROOT, RUNTIMES, draw, rows


def drawn(svg: str, row: dict[str, str | float]) -> bool:
    """Whether a picture has a figure, as it says for readers who do not see it."""
    return f"context, tokens: {row['context']:.0f}; value: {row['value']:g}; runtime: {row['runtime']}" in svg


def test_the_picture_is_of_the_table() -> None:
    found, svg = rows(PAGE.read_text(encoding="utf-8")), PICTURE.read_text(encoding="utf-8")
    assert {row["figure"] for row in found} == set(FIGURES) and {row["runtime"] for row in found} == set(RUNTIMES)
    assert all(drawn(svg, row) for row in found)
    assert PICTURE.relative_to(ROOT).as_posix() in links(README)


def test_another_figure_is_seen() -> None:
    pytest.importorskip("vl_convert")
    found = rows(PAGE.read_text(encoding="utf-8"))
    svg = draw([{**row, "value": 2 * float(row["value"])} for row in found])
    assert not any(drawn(svg, row) for row in found)
