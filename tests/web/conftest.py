"""A browser, the built page, and a tiny package with recorded calls, on a server of plain files."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from still_export.graph.options import ExportOptions
from still_export.targets.export import export
from tests.still_export.serving.conftest import TEMPLATE
from tests.still_export.tiny import still_model
from tests.still_export.training import byte_tokenizer
from tests.still_export.verbs import call

WEB = Path(__file__).resolve().parents[2] / "web"
ISOLATED = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}


@dataclass
class Visit:
    """A tab, and what it said and asked for."""

    tab: Any
    url: str
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def status(self, text: str, timeout_s: float = 60) -> None:
        """Wait until the page's status has `text`."""
        self.tab.wait_for_function(
            "t => document.getElementById('status').textContent.includes(t)", arg=text, timeout=1000 * timeout_s
        )

    def error(self, text: str, timeout_s: float = 60) -> None:
        """Wait until the page complains with `text`."""
        self.tab.wait_for_function(
            "t => document.getElementById('error').textContent.includes(t)", arg=text, timeout=1000 * timeout_s
        )

    def log(self) -> list[str]:
        return list(self.tab.evaluate("[...document.querySelectorAll('#log > :not(.cut)')].map(line => line.said)"))


@pytest.fixture(scope="session")
def dist() -> Path:
    if shutil.which("node") is None or not (WEB / "node_modules" / "axe-core").is_dir():
        pytest.skip("needs Node.js and, in the folder web, npm install --ignore-scripts")
    subprocess.run(["node", "build.mjs"], cwd=WEB, check=True)
    return WEB / "dist"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """For one file: while Playwright runs no other test of this process can have an event loop."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("needs a Chromium: apt-get install chromium")
    with playwright.sync_playwright() as run:
        found = run.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of bytes for browsers, of 8 tokens a chunk, with PyTorch's calls."""
    import torch

    folder = tmp_path_factory.mktemp("web")
    sizes: Any = dict(vocab_size=257, eos_token_id=256, bos_token_id=None, pad_token_id=None)
    model = still_model("llama", torch.float32, sizes=sizes, capacity_tokens=4096)
    model.save_pretrained(folder / "model")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    made = export(ExportOptions(str(folder / "model")), folder / "tiny", to="web", command="still-export tiny").path
    assert not call("verify", made, "--record", made / "calls.npz", "--quiet")
    return made


class Server(ThreadingHTTPServer):
    """Plain files; `headers` are added to each."""

    headers: dict[str, str]


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def end_headers(self) -> None:
        for name, value in getattr(self.server, "headers", {}).items():
            self.send_header(name, value)
        self.send_header("Cache-Control", "no-store")
        super().end_headers()


@pytest.fixture
def site(dist: Path, package: Path, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of the page beside a copy of the package at `package/`; the folder."""
    folder = tmp_path / "site"
    shutil.copytree(dist / "page", folder)
    shutil.copytree(package, folder / "package")
    server = Server(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    server.headers = dict(ISOLATED)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/", folder
    server.shutdown()
    server.server_close()


@contextmanager
def another_visitor(browser: Any, url: str) -> Iterator[Visit]:
    """A phone's tab of its own storage."""
    context = browser.new_context(viewport={"width": 390, "height": 800})
    tab = context.new_page()
    found = Visit(tab, url)
    tab.on("console", lambda message: found.said.append(f"{message.type}: {message.text}"))
    tab.on("pageerror", lambda error: found.said.append(str(error)))
    context.on("request", lambda request: found.asked.append(request.url))
    yield found
    context.close()


@pytest.fixture
def visit(browser: Any, site: tuple[str, Path]) -> Iterator[Visit]:
    """What the tab loads is up to the test; at its end the page must not have complained to the console."""
    with another_visitor(browser, site[0]) as found:
        yield found
