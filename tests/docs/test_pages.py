"""What a reader meets on every page: lines that fit, links that lead somewhere, nothing of one machine."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, links, name, parts

WIDTH = 140
MACHINE = re.compile(r"(?<![\w./~-])/(?:work|home|root|tmp|mnt|data|Users)/\w")
"""Paths that one machine has."""
WORDS = 1300
"""A reader's five minutes; pages of the notebook are looked up, not read."""

every_page = pytest.mark.parametrize("page", PAGES, ids=name)


@pytest.mark.parametrize("page", sorted({*PAGES, *ROOT.glob("*.md"), *ROOT.glob("tests/**/*.md")}), ids=name)
def test_lines_fit(page: Path) -> None:
    """Of prose and code; a row of a table is one line."""
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [line for line in lines if len(line) > WIDTH and not line.startswith("|")]
    assert not long, f"{len(long)} lines are longer than {WIDTH} characters: {long[0]}"


@every_page
def test_commands_are_seen(page: Path) -> None:
    """A block right below a heading is code to some readers of Markdown, and to the tests that run commands it is not."""
    lines = [part for part in parts(page.read_text(encoding="utf-8")) if isinstance(part, str)]
    for above, line in pairwise(lines):
        assert not (above.startswith("#") and line.startswith("    ")), f"an empty line is missing above {line.strip()}"


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and target.is_relative_to(ROOT), f"{link} leads nowhere"
        if anchor:
            assert target.suffix != ".md" or anchor in anchors(target), (
                f"{link}: {path or name(page)} has no such heading"
            )


@every_page
def test_nothing_of_one_machine(page: Path) -> None:
    assert not MACHINE.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name != "notebook"], ids=name)
def test_five_minutes(page: Path) -> None:
    """Bars between the cells of a table are no words."""
    text = page.read_text(encoding="utf-8")
    assert sum(any(letter.isalnum() for letter in word) for word in text.split()) <= WORDS


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            waiting += [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
    assert set(PAGES) <= reached, f"no link leads to {sorted(map(name, set(PAGES) - reached))}"
