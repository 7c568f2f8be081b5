"""The same page from `still-export serve`: a chat over its API, and the key where it asks for one."""

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
        assert not tab.is_visible("#prove") and tab.is_visible("#key")
        tab.fill("#message", "Who?")
        tab.press("#message", "Enter")
        tab.locator("#error", has_text="API key is missing").wait_for()
        assert tab.input_value("#message") == "Who?" and tab.locator("#log > *").count() == 0
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
        lines = tab.evaluate("[...document.getElementById('log').children].map(line => [line.className, line.said])")
        (kind, question), (_, answer), *cut = lines
        assert kind == "user" and [k for k, _ in cut] in ([], ["note cut"])
        assert tab.title() == "tiny" and "Room for about" in tab.inner_text("#holds")
        assert status == 200 and question == "Who?" and answer and asked["choices"]
        assert served.ask("GET", "/page.js")[0] == 200 and served.ask("GET", "/worker.js")[0] == 404
        tab.close()


MARKDOWN = """# Title

One *two* **three** `<b>four</b>` <img src=x onerror=alert(1)> [five](javascript:alert(1)) [six](https://example.org/a_b_c) ![seven](https://x.org/y.png)
line 2_a_3

- a
- b
  1. c
  2. d

| h | i |
|---|---|
| 1 | 2 |

> quoted

```python
x = "*no*"
```
"""


def test_an_answer_is_drawn_and_followed(browser: Any, byte_package: Path) -> None:
    """Markdown as nodes, none of which loads or runs anything; the log follows, unless the reader scrolled away."""
    with serve(byte_package, Settings("tiny", None), rows=1, waiting=1) as served:
        tab, asked = browser.new_page(), []
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(f"http://127.0.0.1:{served.port}/")
        tab.wait_for_selector("[data-loaded]")
        tab.locator("#name", has_text="tiny").wait_for()
        draw = """async text => {
            const { markdown } = await import('/markdown.js');
            const log = document.getElementById('log'), line = document.createElement('div');
            line.className = 'assistant';
            line.append(markdown(text));
            log.replaceChildren(line);
            return line.innerHTML;
        }"""
        drawn = tab.evaluate(draw, MARKDOWN)
        for part in (
            "<h2>Title</h2>",
            "<em>two</em> <strong>three</strong> <code>&lt;b&gt;four&lt;/b&gt;</code> &lt;img",
            "[five](javascript:alert(1))",
            '<a href="https://example.org/a_b_c" rel="noopener noreferrer" target="_blank">six</a>',
            "<br>line 2_a_3</p>",
            "<ul><li>a</li><li>b<ol><li>c</li><li>d</li></ol></li></ul>",
            "<thead><tr><th>h</th><th>i</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody>",
            "<blockquote><p>quoted</p></blockquote>",
            '<code class="language-python">x = "*no*"</code></pre>',
        ):
            assert part in drawn, (part, drawn)
        assert "<img" not in drawn
        for text in ("`" * 20_000, "*" * 20_000, "[" * 20_000, ">" * 20_000, "- " * 5000, "a **b " * 4000, "|-" * 9000):
            took = tab.evaluate(
                f"async t => {{ const b = performance.now(); await ({draw})(t); return performance.now() - b; }}", text
            )
            assert took < 5000, (text[:9], took)
        assert all(url.startswith(f"http://127.0.0.1:{served.port}/") for url in asked)
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        # The slider is what is asked with, and Stop leaves what was said.
        tab.evaluate("t => document.getElementById('log').replaceChildren()", None)
        sent: list[Any] = []
        tab.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
        tab.click("#settings summary")
        tab.locator("#temperature").fill("0.7")
        assert tab.inner_text("#temperature-shown") == "0.7"
        tab.fill("#message", "Who?")
        tab.press("#message", "Enter")
        tab.locator("#status", has_text="Ready.").wait_for()
        assert sent[-1]["temperature"] == 0.7 and sent[-1]["top_p"] == 1
        assert tab.evaluate("(l => l.scrollHeight - l.scrollTop - l.clientHeight < 60)(document.getElementById('log'))")
        tab.close()


def test_a_talk_is_kept_repeated_copied_and_its_end_explained(browser: Any, byte_package: Path) -> None:
    """Over a reload with its settings; again in the place of the last answer; where the server has gone, with the command."""
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    tab, sent = context.new_page(), []
    tab.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)

    def done(answers: int) -> None:
        tab.locator(".foot").nth(answers - 1).wait_for(timeout=120_000)
        tab.locator("#status", has_text="Ready.").wait_for()

    with serve(byte_package, Settings("tiny", None), rows=1, waiting=1) as served:
        url = f"http://127.0.0.1:{served.port}/"
        tab.goto(url)
        tab.wait_for_selector("[data-loaded]")
        assert not tab.is_visible("#key") and not tab.is_visible("#system")
        tab.click("#settings summary")
        tab.fill("#system", "Be brief.")
        tab.fill("#most", "12")
        tab.fill("#message", "Who?")
        tab.press("#message", "Enter")
        done(1)
        assert sent[-1]["max_tokens"] == 12 and sent[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
        assert "tokens, first after" in tab.inner_text(".foot") and "Room for about" in tab.inner_text("#holds")
        tab.click(".copy")
        tab.locator(".copy", has_text="Copied").wait_for()
        said = tab.evaluate("document.querySelector('.assistant').said")
        assert tab.evaluate("navigator.clipboard.readText()") == said and len(said) > 0
        tab.click(".again")
        done(1)
        assert len(sent) == 2 and sent[0]["messages"] == sent[1]["messages"]
        room = tab.inner_text("#holds")
        tab.reload()
        tab.wait_for_selector("[data-loaded]")
        assert tab.locator("#log > .user").count() == tab.locator("#log > .assistant").count() == 1
        assert tab.input_value("#system") == "Be brief." and tab.inner_text("#holds") == room
        tab.fill("#message", "Where?")
        tab.press("#message", "Enter")
        done(2)
        assert [m["role"] for m in sent[-1]["messages"]] == ["system", "user", "assistant", "user"]
    tab.fill("#message", "Still there?")
    tab.press("#message", "Enter")
    tab.locator("#error", has_text=f"still-export serve tiny --port {served.port}").wait_for()
    assert tab.input_value("#message") == "Still there?" and tab.locator("#log > .user").count() == 2
    context.close()
