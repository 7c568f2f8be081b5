"""The pages as a site: built with no warning and no network, whole, and with nothing in it that a reader's browser would fetch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, name

pytest.importorskip("material", reason='needs mkdocs-material: pip install -e ".[docs]"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `mkdocs build --strict` wrote: a page that nav lacks or a link or heading that is not there fails it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ROOT / "mkdocs.yml", "-d", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-2000:]
    return folder


def test_every_page_is_there(site: Path) -> None:
    for page in PAGES:
        place = Path(name(page))
        built = place.parent if place.name == "README.md" else place.with_suffix("")
        assert (site / built / "index.html").is_file(), f"{name(page)} is not in the site"


def test_pages_are_those_of_the_repository(site: Path) -> None:
    """Nothing is loaded from elsewhere, and no list was taken for prose, as a list right below a line of prose is."""
    for page in site.glob("**/*.html"):
        text = page.read_text(encoding="utf-8")
        elsewhere = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="?(?:https?:)?//[^>]*>', text)
        assert not elsewhere, f"{page.relative_to(site)} loads {elsewhere[0]}"
        for paragraph in re.findall(r"<(?:p|li)>(.*?)</(?:p|li)>", text, re.DOTALL):
            item = re.search(r"^(?:- |\d+\. |\|).*", paragraph, re.MULTILINE)
            assert not item, f"{page.relative_to(site)}: an empty line is missing before: {item[0]}"
