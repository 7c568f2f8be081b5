"""The terminal of `still-export run --chat`: a line editor with history, commands, and answers that Ctrl-C stops."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from still_export.cli.output import Output
from still_export.runtime.conversation import Conversation, FullError
from still_export.runtime.sampling import RunError
from still_export.runtime.text import Answer

KEYS = "Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer, Ctrl-D leaves."
TAIL, TIMES = 12, 2
"""Tokens at the end of an answer, and how often they came before, that show a loop."""
HELP = f"""\
/help    these commands
/stats   tokens read and written, speed, tokens in the state
/back    forget the last message and its answer; /back 3: the last three
/reset   forget what was said
/exit    leave
{KEYS}
What you type during an answer is your next message."""


def talk(conversation: Conversation, output: Output, when_full: str) -> None:
    """Talk until /exit or the input ends.

    Args:
        when_full: What happens at the end of the capacity: "ask" to drop the oldest turns, "drop" them, or "stop". Without a terminal
            "ask" stops, as the next line is a message, not an answer to the question.

    Raises:
        RunError: With "stop", the conversation does not fit. Without a terminal, a message cannot be answered.
    """
    in_terminal = _in_terminal()
    when_full = "stop" if when_full == "ask" and not in_terminal else when_full
    read = line_reader()
    last: Answer | None = None
    output.log(opening(conversation))
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
            output.say(f"turns left: {len(conversation.turns)}")
        elif command == "/stats":
            output.say(statistics(conversation, last))
        elif command.startswith("/") and " " not in command and "/" not in command[1:]:
            output.say(f"{command} is no command. Known: /help, /stats, /back, /reset, /exit.")
        else:
            try:
                last = _ask(conversation, message, output, when_full, read) or last
            except FullError:
                raise
            except RunError as error:
                if not in_terminal:
                    raise
                output.say(f"{error}\nThe conversation goes on without this message.")


def _ask(
    conversation: Conversation, message: str, output: Output, when_full: str, read: Callable[[str], str | None]
) -> Answer | None:
    """Returns None if the user keeps the oldest turns and so the message does not fit."""
    stream = answer_stream()
    with interruptible() as stopped, buffered_typing(), output.reading(len(message) // 4) as progress:
        try:
            answer = conversation.ask(message, stream, progress, stopped)
        except FullError as full:
            if when_full == "stop":
                raise
            if when_full == "ask":
                output.say(str(full))
                if (read("forget them? [Y/n] ") or "n").strip().lower() not in ("", "y", "yes"):
                    return None
            else:
                output.log(f"[the capacity is used up; oldest turns forgotten: {full.turns}]")
            conversation.drop(full.turns)
            answer = conversation.ask(message, stream, progress, stopped)
    if answer.ended == "length":
        again = "; it repeats itself: --repetition-penalty 1.2 helps" if repeats(answer.tokens) else ""
        output.log(f"[cut at {len(answer.tokens)} tokens, by --tokens{again}]")
    elif answer.ended == "interrupted":
        output.log(f"[stopped by Ctrl-C after {len(answer.tokens)} tokens]")
    return answer


def repeats(tokens: Sequence[int]) -> bool:
    """Whether an answer ends in a loop: its last tokens have come in the same order several times."""
    last = list(tokens[-TAIL:])
    return sum(list(tokens[at : at + TAIL]) == last for at in range(len(tokens) - TAIL)) >= TIMES


def opening(conversation: Conversation) -> str:
    """Lines before the first message: the model, its capacity, the keys."""
    runner = conversation.model
    made_of = (runner.manifest.get("config") or {}).get("model")
    name = Path(made_of).name if made_of else runner.manifest["model"]["family"]
    table = runner.table
    room = f"{table.capacity_tokens:,} tokens" if table.bounded else "conversations of any length"
    return f"{name} ({runner.folder}) has room for {room}.\n{KEYS}\n/help: commands"


def statistics(conversation: Conversation, last: Answer | None) -> str:
    model = conversation.model
    length = int(model.length[0])
    table = model.table
    size = table.size_bytes(1, model.rows(length)) / 1e6
    bound = f" of {table.capacity_tokens:,}" if table.bounded else ""
    lines = [f"{length:,}{bound} tokens read, turns: {len(conversation.turns)}, size of the state: {size:.1f} MB"]
    if last is not None:
        lines.append(
            f"last answer: {len(last.tokens)} tokens, the first after {last.first_token_s:.2f} s, "
            f"{last.decode_tokens_per_s:.1f} tokens/s, ended by {ENDS[last.ended]}"
        )
    return "\n".join(lines)


ENDS = {"end": "the model", "length": "--tokens", "stop": "a stop text", "interrupted": "Ctrl-C"}


class TerminalText:
    """A text that comes in pieces, on a terminal: words are not cut at its edge, and control characters are shown, not obeyed."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._column, self._word = 0, ""

    def write(self, text: str) -> None:
        """Write what is complete: a word waits for its end, or for the width of the terminal."""
        from prompt_toolkit.utils import get_cwidth

        width = shutil.get_terminal_size().columns
        for part in _PARTS.findall(_visible(text)):
            is_space, size = part.isspace(), get_cwidth(part)
            if is_space or size > len(part) or get_cwidth(self._word) + size >= width:
                self._end_word(width)
            if is_space and self._column + size > width:
                part = "\n"
            if part == "\n":
                self._column = 0
            elif is_space:
                self._column += size
            else:
                self._word += part
                continue
            self.stream.write(part)

    def _end_word(self, width: int) -> None:
        from prompt_toolkit.utils import get_cwidth

        size = get_cwidth(self._word)
        if self._column and self._column + size > width:
            self.stream.write("\n")
            self._column = 0
        self.stream.write(self._word)
        self._column += size
        self._word = ""

    def flush(self) -> None:
        self.stream.flush()


_PARTS = re.compile(r"\n|[^\S\n]+|[^\s\u1100-\U0010ffff]+|[\u1100-\U0010ffff]")
"""Of a text: line ends, spaces, words; scripts that may be broken anywhere, character by character."""
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that move the cursor, color, title or direction of a terminal's text."""


def _visible(text: str) -> str:
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def answer_stream() -> Any:
    """Standard output, as an answer is written to it: to a file or a pipe as it is, to a terminal as TerminalText."""
    return TerminalText(sys.stdout) if sys.stdout.isatty() else sys.stdout


def _in_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def line_reader() -> Callable[[str], str | None]:
    """Returns a function that reads one message, or None at the end of input: a line editor in a terminal, plain lines elsewhere."""
    if not _in_terminal():

        def plain(prompt: str) -> str | None:
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None

        return plain
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from still_export.disk import history_file

    try:
        path = history_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        history: Any = FileHistory(str(path))
    except OSError:  # the home folder is not writable
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
def buffered_typing() -> Iterator[None]:
    """Inside the block, typed text is not shown, and is available to the next `read`, even after Ctrl-C."""
    if not _in_terminal():
        yield
        return
    import termios

    before = termios.tcgetattr(0)
    quiet = [*before]
    quiet[0] &= ~termios.ICRNL
    quiet[3] = quiet[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH
    termios.tcsetattr(0, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSANOW, before)


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Inside the block the yielded function reports whether Ctrl-C was pressed; a second Ctrl-C raises.

    An exception during a call would leave a state that is updated in place half written.
    """
    pressed = False

    def on_interrupt(number: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
