"""The page in a real browser: it answers as `run` does, proves itself, sees a fault, needs no mouse and no network."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from still_export.package.folder import open_package, write_manifest
from still_export.runtime.conversation import Conversation
from still_export.runtime.ort import OrtModel
from still_export.runtime.sampling import Sampling
from still_export.runtime.snapshot import Snapshot
from still_export.runtime.text import Text
from tests.web.conftest import WEB, Visit, another_visitor

pytestmark = pytest.mark.slow
TOKENS = 512
ALIKE = 96
"""Characters that are compared: later ones of a random model may hang on a near tie."""
DOCUMENT = "The ship left the harbour at dawn. " * 40


def answered(package: Path, message: str, snapshot: Path | None = None) -> str:
    """What `run --chat` answers."""
    model = OrtModel(package, threads=1)
    prefix = Snapshot.load(snapshot) if snapshot else None
    return Conversation(model, Text(model), TOKENS, Sampling(), prefix=prefix).ask(message, None).text


def rewritten(package: Path) -> None:
    """Make a changed package whole again: its manifest has the hashes of what lies there now."""
    content = {k: v for k, v in open_package(package, check_hashes=False).manifest.items() if k != "files"}
    write_manifest(package, content)


def quiet(visit: Visit) -> None:
    assert visit.said == []


def say(visit: Visit, message: str) -> str:
    visit.tab.fill("#message", message)
    visit.tab.keyboard.press("Enter")
    visit.status("Ready.", 180)
    return visit.log()[-1]


def undisturbed(browser: Any, url: str) -> list[str]:
    """Two answers of one conversation in which nothing goes wrong."""
    with another_visitor(browser, url) as visit:
        visit.tab.goto(f"{url}?package=package/")
        visit.status("Ready")
        return [say(visit, "Who?"), say(visit, "Where?")]


def drop(visit: Visit, path: Path) -> None:
    devices = visit.tab.context.new_cdp_session(visit.tab)
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        devices.send("Input.dispatchDragEvent", {"type": kind, "x": 50, "y": 50, "data": data})


def test_chat_by_keyboard_alone_and_without_a_network(visit: Visit, package: Path) -> None:
    visit.tab.goto(f"{visit.url}?package=package/")
    visit.status("Ready")
    assert visit.tab.evaluate("crossOriginIsolated && document.activeElement.id") == "message"
    asked = len(visit.asked)
    visit.tab.keyboard.type("Who?")
    visit.tab.keyboard.press("Enter")
    visit.status("Ready.")
    question, answer = visit.log()
    assert (question, answer[:ALIKE]) == ("Who?", answered(package, "Who?")[:ALIKE])
    assert len(visit.asked) == asked, "a request after the load"
    assert visit.tab.locator("#log > .cut").count() == 1, "512 tokens are all that an answer may have"
    assert visit.tab.inner_text("#name") == "model" and "4,096 tokens" in visit.tab.inner_text("#holds")
    assert "tokens a second" in visit.tab.locator("#rate").text_content()
    reached = []
    for _ in range(12):
        visit.tab.keyboard.press("Tab")
        reached.append(visit.tab.evaluate("document.activeElement.id"))
    assert {"send", "clear", "document", "save", "load", "prove", "calls", "folder"} <= set(reached)
    visit.tab.context.set_offline(True)
    visit.tab.reload()
    visit.status("Ready")
    visit.tab.keyboard.type("Who?")
    visit.tab.keyboard.press("Enter")
    visit.status("Ready.")
    assert len(visit.log()) == 2
    assert visit.tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than a phone"
    quiet(visit)


def reach(visit: Visit, name: str) -> None:
    """Move the focus to an element by the Tab key alone."""
    for _ in range(20):
        if visit.tab.evaluate("document.activeElement.id") == name:
            return
        visit.tab.keyboard.press("Tab")
    raise AssertionError(f"{name} is not reached by the keyboard")


def at_message(visit: Visit) -> None:
    """Wait until the page has moved the focus to where one types."""
    visit.tab.wait_for_function("document.activeElement.id === 'message'")


def choose(visit: Visit, name: str, path: Path) -> None:
    """Open the chooser of a file input by the keyboard, and choose there."""
    reach(visit, name)
    with visit.tab.expect_file_chooser() as chooser:
        visit.tab.keyboard.press("Enter")
    chooser.value.set_files(str(path))


def test_a_directory_is_chosen_by_keyboard_alone(visit: Visit, package: Path, tmp_path: Path) -> None:
    paper, reading = tmp_path / "paper.txt", tmp_path / "reading.safetensors"
    paper.write_text(DOCUMENT)
    visit.tab.on("filechooser", lambda _: None)  # from here on, so that no key comes before Playwright listens
    visit.tab.goto(visit.url)
    visit.status("Choose")
    choose(visit, "folder", package)
    at_message(visit)
    choose(visit, "document", paper)
    visit.status("ask about the document")
    reach(visit, "save")
    with visit.tab.expect_download() as download:
        visit.tab.keyboard.press("Enter")
    download.value.save_as(reading)
    visit.status("Saved")
    reach(visit, "message")
    visit.tab.keyboard.type(" Where?")
    visit.tab.keyboard.press("Enter")
    visit.status("Ready.")
    at_message(visit)
    answer = visit.log()[-1]
    reach(visit, "clear")
    visit.tab.keyboard.press("Space")
    visit.status("a new conversation")
    choose(visit, "load", reading)
    visit.status("ask about what was read")
    reach(visit, "message")
    visit.tab.keyboard.type(" Where?")
    visit.tab.keyboard.press("Enter")
    visit.status("Ready.")
    at_message(visit)
    assert visit.log()[-1] == answer
    reach(visit, "prove")
    visit.tab.keyboard.press("Enter")
    visit.status("Proven: ")
    visit.tab.evaluate("document.getElementById('status').textContent = ''")
    choose(visit, "calls", package / "calls.npz")
    visit.status("Proven: ")
    quiet(visit)


def test_a_document_is_read_once_and_travels(visit: Visit, browser: Any, package: Path, tmp_path: Path) -> None:
    paper, other = tmp_path / "paper.txt", tmp_path / "paper.safetensors"
    paper.write_text(DOCUMENT)
    visit.tab.goto(visit.url)
    visit.status("Choose")
    drop(visit, package)
    visit.status("Ready")
    visit.tab.evaluate(
        "self.seen = []; new MutationObserver(() => seen.push(document.getElementById('progress').value))"
        ".observe(document.getElementById('progress'), {attributes: true})"
    )
    drop(visit, paper)
    visit.status("ask about the document")
    tokens = int(visit.log()[0].split("read, ")[1].split(" ")[0].replace(",", ""))
    assert tokens > len(DOCUMENT)
    pieces = {at for at in visit.tab.evaluate("seen") if at > 1}
    assert len(pieces) >= tokens // 256, "progress is shown between the pieces"
    before = visit.tab.locator("#memory").text_content()
    with visit.tab.expect_download() as download:
        visit.tab.click("#save")
    download.value.save_as(other)
    assert Snapshot.load(other).length == tokens and Snapshot.load(other).place == "user"
    expected = say(visit, " Where?")
    assert expected[:ALIKE] == answered(package, " Where?", other)[:ALIKE]
    with another_visitor(browser, visit.url) as next_one:
        next_one.tab.goto(f"{visit.url}?package=package/")
        next_one.status("Ready")
        next_one.tab.set_input_files("#load", str(other))
        next_one.status("ask about what was read")
        assert next_one.tab.locator("#memory").text_content() == before
        assert say(next_one, " Where?") == expected
        quiet(next_one)
    other.write_bytes(b"no state at all")
    visit.tab.set_input_files("#load", str(other))
    visit.error("is no saved state")
    assert visit.log()[-1] == expected, "the conversation stays"
    quiet(visit)


def test_reading_stops(visit: Visit, package: Path, tmp_path: Path) -> None:
    paper = tmp_path / "long.txt"
    paper.write_text(DOCUMENT * 2)
    visit.tab.goto(f"{visit.url}?package=package/")
    visit.status("Ready")
    click = "new MutationObserver(() => document.getElementById('stop').click())"
    visit.tab.evaluate(f"{click}.observe(document.getElementById('progress'), {{attributes: true}})")
    visit.tab.set_input_files("#document", str(paper))
    visit.status("ask about the document")
    assert "read in part" in visit.log()[0]
    quiet(visit)


def test_the_proof_passes_and_a_fault_fails(visit: Visit, site: tuple[str, Path], tmp_path: Path) -> None:
    visit.tab.goto(f"{visit.url}?package=package/")
    visit.status("recorded calls")
    visit.tab.click("#prove")
    visit.status("Proven: ")
    rows = visit.tab.locator("#proof tbody tr").all_text_contents()
    assert len(rows) > 5 and all(row.endswith("passed") for row in rows)
    faulty = site[1] / "faulty"
    shutil.copytree(site[1] / "package", faulty)
    graph = onnx.load(faulty / "model.onnx", load_external_data=False)
    name = next(i for i in graph.graph.initializer if "q_proj" in i.name)
    place = {e.key: e.value for e in name.external_data}
    weights = np.memmap(
        faulty / place["location"], np.float32, "r+", int(place["offset"]), (int(place["length"]) // 4,)
    )
    weights[7] += 1.0
    weights.flush()
    visit.tab.goto(f"{visit.url}?package=faulty/")
    visit.error("is not the file that was exported")
    rewritten(faulty)
    visit.tab.evaluate("caches.delete('packages')")
    visit.tab.goto(f"{visit.url}?package=faulty/")
    visit.status("recorded calls")
    visit.tab.click("#prove")
    visit.status("Not proven: ")
    other = tmp_path / "other.npz"
    other.write_bytes(b"no archive")
    visit.tab.set_input_files("#calls", str(other))
    visit.error("this file holds no recorded calls, or is damaged")
    quiet(visit)


def test_what_is_wrong_is_a_sentence(visit: Visit, browser: Any, package: Path, tmp_path: Path) -> None:
    visit.tab.goto(visit.url)
    visit.status("Choose")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes.txt").write_text("nothing")
    visit.tab.set_input_files("#folder", str(folder))
    visit.error("this is no package: it has no manifest.json")
    shutil.copytree(package, tmp_path / "package")
    weights = tmp_path / "package" / "model.onnx.data"
    whole = weights.read_bytes()
    weights.unlink()
    visit.tab.set_input_files("#folder", str(tmp_path / "package"))
    visit.error("model.onnx.data is missing from this package")
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    visit.tab.set_input_files("#folder", str(tmp_path / "package"))
    visit.error("model.onnx.data is not the file that was exported")
    weights.write_bytes(whole)
    visit.tab.set_input_files("#folder", str(tmp_path / "package"))
    visit.status("Ready")
    first = say(visit, "Who?")
    visit.tab.set_input_files("#folder", str(folder))
    visit.error("this is no package")
    visit.tab.fill("#message", "x" * 5000)
    visit.tab.keyboard.press("Enter")
    visit.error("exceed this package's capacity of 4096 tokens")
    assert visit.tab.input_value("#message") == "x" * 5000, "what was typed stays"
    assert visit.log() == ["Who?", first]
    assert [first, say(visit, "Where?")] == undisturbed(browser, visit.url), "the conversation goes on"
    quiet(visit)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("WebAssembly.validate = () => false;", "this browser has no WebAssembly SIMD"),
        (
            "WebAssembly.Memory = class { constructor() { throw new RangeError('could not allocate memory'); } };",
            "out of memory",
        ),
    ],
    ids=["no SIMD", "no memory"],
)
def test_a_browser_that_cannot(visit: Visit, site: tuple[str, Path], broken: str, message: str) -> None:
    worker = site[1] / "worker.js"
    worker.write_text(broken + worker.read_text())
    visit.tab.goto(f"{visit.url}?package=package/")
    visit.error(message)


NO_ROOM = """
self.addEventListener("message", ({ data }) => {
  self.whole ??= self.stillWasm?._malloc;
  if (self.whole) self.stillWasm._malloc = data.message === "More?" ? () => 0 : self.whole;
});
"""


def test_a_conversation_outlives_the_end_of_memory(visit: Visit, browser: Any, site: tuple[str, Path]) -> None:
    worker = site[1] / "worker.js"
    worker.write_text(NO_ROOM + worker.read_text())
    visit.tab.goto(f"{visit.url}?package=package/")
    visit.status("Ready")
    first = say(visit, "Who?")
    visit.tab.fill("#message", "More?")
    visit.tab.keyboard.press("Enter")
    visit.error("this tab is out of memory")
    assert visit.log() == ["Who?", first] and visit.tab.input_value("#message") == "More?"
    assert [first, say(visit, "Where?")] == undisturbed(browser, visit.url)
    quiet(visit)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_it(visit: Visit, scheme: str) -> None:
    visit.tab.emulate_media(color_scheme=scheme)
    visit.tab.goto(f"{visit.url}?package=package/")
    visit.status("recorded calls")
    say(visit, "Who?")
    visit.tab.click("#prove")
    visit.status("Proven: ")
    visit.tab.add_script_tag(path=WEB / "node_modules" / "axe-core" / "axe.min.js")
    found = visit.tab.evaluate("axe.run()")
    assert [(v["id"], [n["html"] for n in v["nodes"]]) for v in found["violations"]] == []
    assert {"color-contrast", "label", "button-name"} <= {p["id"] for p in found["passes"]}
    sizes = "[...document.querySelectorAll('button, .file')].map(e => e.getBoundingClientRect()).map(r => [r.width, r.height])"
    assert all(min(size) >= 44 for size in visit.tab.evaluate(sizes)), "smaller than a finger"
    quiet(visit)
