"""What a reader meets on every page: links that lead somewhere, nothing of one machine."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, links, name, parts

MACHINE = re.compile(r"(?<![\w./~-])/(?:work|home|root|tmp|mnt|data|Users)/\w")
"""Paths that one machine has."""

every_page = pytest.mark.parametrize("page", PAGES, ids=name)


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


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            waiting += [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
    assert set(PAGES) <= reached, f"no link leads to {sorted(map(name, set(PAGES) - reached))}"
