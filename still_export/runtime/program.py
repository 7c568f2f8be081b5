"""The command line of packages' stand-alone programs. Exports copy this file into packages."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from still_export.package.refusals import printable
from still_export.package.trust import trust_package
from still_export.runtime.base import Runner
from still_export.runtime.conversation import Conversation, FullError
from still_export.runtime.sampling import SETTINGS, RunError, Sampling
from still_export.runtime.snapshot import Snapshot
from still_export.runtime.text import Answer, Text, token_ids, write_answer


def talk(conversation: Conversation) -> None:
    """Chat until the input ends; at the end of the capacity the oldest turns are dropped."""
    while True:
        try:
            message = input("> ")
        except EOFError:
            return
        try:
            conversation.ask(message)
        except FullError as full:
            conversation.drop(full.turns)
            conversation.ask(message)


def _content(options: argparse.Namespace) -> str | None:
    """The text of --prompt or --prompt-file.

    Raises:
        RunError: The file is not readable.
    """
    if "-" in (options.prompt, str(options.prompt_file)):
        return sys.stdin.read().removeprefix("\ufeff")
    if options.prompt_file is None:
        return options.prompt
    try:
        return options.prompt_file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise RunError(f"--prompt-file {options.prompt_file} cannot be read: {error}.") from error


def run_program(
    description: str,
    folder: Path,
    open_runner: Callable[[argparse.Namespace], Runner],
    add_options: Callable[[argparse.ArgumentParser], None],
    failures: tuple[type[Exception], ...] = (RunError, MemoryError),
) -> int:
    """A package's program: parse the command line, answer, report; the exit code.

    Args:
        description: For --help.
        folder: The package where none is named.
        open_runner: From the parsed options to the runner.
        add_options: Adds the runtime's own options.
        failures: Errors that are a user's.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=folder, help="the package (default: here)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", help="text to continue, or with --chat the message; - reads standard input")
    what.add_argument("--prompt-file", type=Path, help="file with that text; - reads standard input")
    what.add_argument("--prompt-ids", type=token_ids, help="token ids to continue, separated by commas")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the model's chat format, for which jinja2 is needed; without a prompt, a talk",
    )
    parser.add_argument("--system", help="system message of a chat")
    parser.add_argument("--load-state", type=Path, help="go on from a state that `still-export run --save-state` wrote")
    parser.add_argument(
        "--tokens", "--max-new-tokens", type=int, default=128, help="tokens to generate at most (default 128)"
    )
    for entry in SETTINGS:
        name, kind, text = f"--{entry.name.replace('_', '-')}", type(entry.default), entry.metadata["help"]
        parser.add_argument(name, type=kind, default=entry.default, help=f"{text} (default: {entry.default})")
    parser.add_argument("--stop", action="append", default=[], help="text that ends an answer; repeatable")
    parser.add_argument(
        "--trust-native", action="store_true", help="load native code that this machine did not build, and remember it"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    add_options(parser)
    options = parser.parse_args()
    asked = [x for x in (options.prompt, options.prompt_file, options.prompt_ids) if x is not None]
    if not asked and not options.chat:
        parser.error("give one of --prompt, --prompt-file, --prompt-ids, --chat")
    if options.chat and options.prompt_ids:
        parser.error("--prompt-ids has no chat format: leave out --chat, or give --prompt")
    if options.system is not None and not options.chat:
        parser.error("--system is for --chat")
    try:
        if options.trust_native:
            trust_package(options.folder)
        sampling = Sampling(**{entry.name: getattr(options, entry.name) for entry in SETTINGS})
        content = _content(options)
        prefix = None if options.load_state is None else Snapshot.load(options.load_state)
        model = open_runner(options)
        model.start()
        if options.chat:
            if prefix is not None and prefix.place == "text":
                raise RunError(f"{options.load_state} holds a plain text, not a chat. Leave out --chat.")
            talked = Conversation(model, Text(model), options.tokens, sampling, options.system, options.stop, prefix)
            talk(talked) if content is None else talked.ask(content)
            return 0
        text = None if options.prompt_ids else Text(model)
        ids = options.prompt_ids or (text.encode(content or "", special=prefix is None) if text else [])
        if prefix is not None:
            prefix.restore(model, len(ids))
            ids = [*prefix.unread, *ids]
        write_answer(Answer(model, text, ids, options.tokens, sampling, stop=options.stop))
    except failures as error:
        if options.debug:
            raise
        print(f"error: {printable(str(error)) or 'out of memory'}", file=sys.stderr)
        return 2
    return 0
