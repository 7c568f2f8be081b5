"""The same page from `still-export serve`: a chat over its API, and the key where it asks for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from still_export.serving.app import Settings
from tests.still_export.serving.conftest import byte_package
from tests.still_export.serving.test_app import serve

__all__ = ["byte_package"]

pytestmark = pytest.mark.slow


def test_a_server_shows_its_face(browser: Any, byte_package: Path) -> None:
    said: list[str] = []
    with serve(byte_package, Settings("tiny", "secret"), rows=1, waiting=1) as served:
        tab = browser.new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.goto(f"http://127.0.0.1:{served.port}/")
        tab.wait_for_selector("[data-loaded]")
        assert not tab.is_visible("#prove") and not tab.is_visible("#key") and not said
        tab.fill("#message", "Who?")
        tab.keyboard.press("Enter")
        tab.locator("#error", has_text="API key is missing").wait_for()
        assert tab.input_value("#message") == "Who?" and tab.locator("#log p").count() == 0
        assert all("401" in line for line in said), "what Chromium says of a refused request"
        tab.fill("#api-key", "secret")
        tab.click("#send")
        tab.locator("#status", has_text="Ready.").wait_for()
        status, asked = served.ask(
            "POST",
            "/v1/chat/completions",
            {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "temperature": 1},
            {"content-type": "application/json", "authorization": "Bearer secret"},
        )
        question, answer = tab.locator("#log p").all_text_contents()
        assert status == 200 and question == "Who?" and answer and asked["choices"]
        assert served.ask("GET", "/page.js")[0] == 200 and served.ask("GET", "/worker.js")[0] == 404
        tab.close()
