"""The terminal of `still-export run --chat`: a line editor with history, commands, answers that Ctrl-C stops."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from still_export.cli.output import Output
from still_export.package.trust import home
from still_export.runtime.conversation import Conversation, FullError
from still_export.runtime.text import Answer

HELP = """\
/help    these commands
/stats   tokens read and written, speed, what the state holds
/back    forget the last message and its answer; /back 3: the last three
/reset   forget what was said
/exit    leave (as Ctrl-D)
Ctrl-C stops an answer; what follows is another message. Alt-Enter begins a new line."""
WHEN_FULL = ("ask", "drop", "stop")


def talk(conversation: Conversation, output: Output, when_full: str) -> None:
    """Talk until /exit or the input ends.

    Args:
        conversation: With the model.
        output: For what is no answer.
        when_full: At the end of the capacity: "ask" whether the oldest turns may go, "drop" them, or "stop".

    Raises:
        RunError: A message does not fit; with "stop", the conversation does not.
    """
    read = line_reader()
    last: Answer | None = None
    while (message := read("> ")) is not None:
        command = message.strip()
        if not command:
            continue
        if command in ("/exit", "/quit"):
            return
        if command == "/help":
            output.say(HELP)
        elif command == "/reset":
            conversation.reset()
            last = None
            output.say("forgotten")
        elif found := re.fullmatch(r"/back(?:\s+(\d{1,6}))?", command):
            conversation.back(int(found[1] or 1))
            output.say(f"{len(conversation.turns)} turns are left")
        elif command == "/stats":
            output.say(statistics(conversation, last))
        elif command.startswith("/") and " " not in command and "/" not in command[1:]:
            output.say(f"{command} is no command. Known: /help, /stats, /back, /reset, /exit.")
        else:
            last = _ask(conversation, message, output, when_full, read) or last


def _ask(
    conversation: Conversation, message: str, output: Output, when_full: str, read: Callable[[str], str | None]
) -> Answer | None:
    """The answer, after room was made where there was none; None where the user keeps the oldest turns."""
    with interruptible() as stopped, output.reading(len(message) // 4) as progress:
        try:
            return conversation.ask(message, sys.stdout, progress, stopped)
        except FullError as full:
            if when_full == "stop":
                raise
            if when_full == "ask":
                output.say(str(full))
                if (read("forget them? [Y/n] ") or "n").strip().lower() not in ("", "y", "yes"):
                    return None
            else:
                output.log(f"[the {full.turns} oldest turns are forgotten: the capacity is used up]")
            conversation.drop(full.turns)
            return conversation.ask(message, sys.stdout, progress, stopped)


def statistics(conversation: Conversation, last: Answer | None) -> str:
    """Lines of /stats."""
    model = conversation.model
    held = int(model.length[0])
    table = model.table
    size = table.size_bytes(1, table.rows(held)) / 1e6
    bound = f" of {table.capacity_tokens:,}" if table.bounded else ""
    lines = [f"{held:,}{bound} tokens read in {len(conversation.turns)} turns; their state has {size:.1f} MB"]
    if last is not None:
        lines.append(
            f"last answer: {len(last.tokens)} tokens, the first after {last.first_token_s:.2f} s, "
            f"{last.decode_tokens_per_s:.1f} tokens/s, ended by {ENDS[last.ended]}"
        )
    return "\n".join(lines)


ENDS = {"end": "the model", "length": "--tokens", "stop": "a stop text", "interrupted": "Ctrl-C"}


def line_reader() -> Callable[[str], str | None]:
    """A function that reads a message behind a prompt, None at the input's end: an editor in a terminal, plain lines elsewhere."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):

        def plain(prompt: str) -> str | None:
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None

        return plain
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path = Path(os.environ.get("XDG_STATE_HOME") or home() / ".local/state") / "still-export" / "chat-history"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        history: Any = FileHistory(str(path))
    except OSError:  # no home that can be written
        history = InMemoryHistory()
    session: PromptSession[str] = PromptSession(history=history, enable_history_search=True)

    def edited(prompt: str) -> str | None:
        while True:
            try:
                return session.prompt(prompt)
            except KeyboardInterrupt:
                continue  # Ctrl-C drops the line, as in a shell
            except EOFError:
                return None

    return edited


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Inside the block Ctrl-C sets what the yielded function says instead of raising; a second one raises.

    An exception in the middle of a call would leave a state that is updated in place half old and half new.
    """
    asked = False

    def on_interrupt(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
