"""`run --chat` in a terminal: its opening, a cut answer's mark, and what is typed during an answer."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_toolkit.utils import get_cwidth
from rich.console import Console

from still_export.cli import chat
from still_export.cli.chat import TerminalText, opening, talk
from still_export.cli.output import Output

PROMPT = "\x1b[?2004h"  # what the editor prints as it begins to read

TALK = """
import json, pathlib, sys, time
from types import SimpleNamespace
from still_export.cli import chat
from still_export.cli.output import Output
from still_export.runtime.conversation import FullError
from still_export.runtime.sampling import RunError
folder = pathlib.Path(sys.argv[1])
asked = []
def ask(message, stream, progress, stopped):
    asked.append(message)
    (folder / "asked").write_text(json.dumps(asked))
    if message == "too long":
        raise RunError("900 tokens exceed the capacity.")
    if message == "full":
        raise FullError(1, 400)
    print("the answer begins", flush=True)
    while not stopped() and not (folder / "answered").exists():
        time.sleep(0.01)
    print("the answer ends", flush=True)
    return SimpleNamespace(ended="end", tokens=[])
chat.opening = lambda conversation: "opened"
chat.talk(SimpleNamespace(ask=ask), Output(), "ask")
"""


class Terminal:
    """A pseudo-terminal with a process; `shown` is what it has printed."""

    def __init__(self, *words: object, home: Path) -> None:
        self.here, there = pty.openpty()
        begin = "import os; os.setsid(); import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
        command = [sys.executable, "-c", begin + TALK, *map(str, words)]
        environment = {**os.environ, "XDG_STATE_HOME": str(home), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(command, stdin=there, stdout=there, stderr=there, env=environment)
        os.close(there)
        self.shown, self.seen = "", 0

    def until(self, text: str, timeout_s: float = 60) -> None:
        """Read until `text` was printed behind what was waited for before."""
        end = time.monotonic() + timeout_s
        while (found := self.shown.find(text, self.seen)) < 0:
            assert time.monotonic() < end, f"{text!r} is not in {self.shown[self.seen :]!r}"
            if select.select([self.here], [], [], 0.1)[0]:
                self.shown += os.read(self.here, 4096).decode(errors="replace")
        self.seen = found + len(text)

    def type(self, keys: str) -> None:
        os.write(self.here, keys.encode())

    def end(self) -> None:
        """Ctrl-D at the next prompt ends the talk."""
        self.until("the answer ends")
        self.until(PROMPT)
        self.type("\x04")
        assert self.process.wait(120) == 0


def test_what_is_typed_during_an_answer_is_the_next_message(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, home=tmp_path)
    terminal.until(PROMPT)
    terminal.type("one\r")
    terminal.until("the answer begins")
    terminal.type("two w")
    time.sleep(0.1)
    terminal.type("\x03")  # Ctrl-C ends the answer, and not what was typed
    terminal.until("the answer ends")
    assert "two" not in terminal.shown[: terminal.seen], "typing is mixed into the answer"
    (tmp_path / "answered").touch()
    terminal.until("two w")
    terminal.type("ords\r")
    terminal.end()
    assert (tmp_path / "asked").read_text() == '["one", "two words"]'


def test_a_refused_message_does_not_end_the_talk(tmp_path: Path) -> None:
    (tmp_path / "answered").touch()
    terminal = Terminal(tmp_path, home=tmp_path)
    terminal.until(PROMPT)
    terminal.type("too long\r")
    terminal.until("900 tokens exceed the capacity.")
    terminal.until("goes on without this message")
    terminal.until(PROMPT)
    terminal.type("full\r")
    terminal.until("forget them?")
    terminal.type("n\r")
    terminal.until(PROMPT)
    terminal.type("three\r")
    terminal.end()
    assert (tmp_path / "asked").read_text() == '["too long", "full", "three"]'


def test_a_talk_opens_with_the_model_and_marks_a_cut_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = SimpleNamespace(bounded=True, capacity_tokens=4096)
    manifest = {"config": {"model": "hub/Some-Model-1B"}, "model": {"family": "llama"}}
    runner = SimpleNamespace(manifest=manifest, table=table, folder=Path("made"))
    answers = iter(("end", "length"))
    talked: Any = SimpleNamespace(
        model=runner, ask=lambda *_: SimpleNamespace(ended=next(answers), tokens=[1] * 7, text="")
    )
    lines = iter(["Hello\n", "Go on\n", ""])
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False, readline=lambda: next(lines)))
    talk(talked, Output(), "stop")
    said = capsys.readouterr().err
    assert said.startswith("Some-Model-1B (made) has room for 4,096 tokens.") and "/help" in said and "Ctrl-C" in said
    assert said.count("[cut at 7 tokens, by --tokens]") == 1
    table.bounded, manifest["config"] = False, {}
    assert opening(talked).startswith("llama (made) has room for conversations of any length.")


def test_an_answer_that_ends_in_a_loop_is_found() -> None:
    plain, loop = list(range(100)), [*range(9), 3] * 9
    assert not chat.repeats([]) and not chat.repeats(plain) and not chat.repeats([*plain[-12:], *plain])
    assert chat.repeats([*plain, *loop]) and chat.repeats([7] * 40) and not chat.repeats([*loop, *plain])


def test_what_takes_long_says_so_at_once() -> None:
    """In a terminal: a spinner while a package is opened, a bar before the first phase of a proof is told."""
    console = Console(file=io.StringIO(), force_terminal=True)
    output = Output()
    output.errors = console
    with output.waiting("opening package"):
        time.sleep(0.2)
    with output.phases() as progress:
        time.sleep(0.2)
        progress("layers", 1, 2)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "opening package" in shown and "loading" in shown and shown.index("loading") < shown.index("layers")


def test_words_are_whole_and_control_characters_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    said = (
        "The quick brown fox jumps over the lazy dog.\n\nnext\x1b[2J\x07\x9b\u202e line, café "
        + "w" * 30
        + " "
        + "世界" * 15
        + "\n"
    )
    for step in (1, 3, 1000):
        shown = io.StringIO()
        text = TerminalText(shown)
        for at in range(0, len(said), step):
            text.write(said[at : at + step])
        lines = shown.getvalue().split("\n")
        assert lines[:4] == ["The quick brown fox ", "jumps over the lazy ", "dog.", ""]
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(shown.getvalue())
        kept = shown.getvalue().replace("\n", "").replace(" ", "")
        assert "next\\x1b[2J\\x07\\x9b\\u202eline,caf\u00e9" + "w" * 30 in kept
        assert "世界" * 15 in kept and all(get_cwidth(line) <= 20 or " " not in line for line in lines)


def test_where_ctrl_c_stopped_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    ended = SimpleNamespace(ended="interrupted", tokens=[1, 2, 3])
    conversation: Any = SimpleNamespace(ask=lambda *_: ended)
    chat._ask(conversation, "hello", Output(), "ask", lambda prompt: None)
    assert "[stopped by Ctrl-C after 3 tokens]" in capsys.readouterr().err
