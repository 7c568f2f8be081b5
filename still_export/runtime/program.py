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
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="text to continue")
    what.add_argument("--prompt-ids", type=token_ids, help="token ids to continue, separated by commas")
    what.add_argument("--chat", action="store_true", help="talk with the model; ends at end of input")
    parser.add_argument("--system", help="system message of a chat")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate at most (default 128)")
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
    try:
        if options.trust_native:
            trust_package(options.folder)
        sampling = Sampling(**{entry.name: getattr(options, entry.name) for entry in SETTINGS})
        model = open_runner(options)
        model.start()
        if options.prompt_ids:
            write_answer(Answer(model, None, options.prompt_ids, options.tokens, sampling))
            return 0
        text = Text(model)
        if options.chat:
            talk(Conversation(model, text, options.tokens, sampling, options.system, options.stop))
        else:
            write_answer(Answer(model, text, text.encode(options.prompt), options.tokens, sampling, stop=options.stop))
    except failures as error:
        if options.debug:
            raise
        print(f"error: {printable(str(error)) or 'out of memory'}", file=sys.stderr)
        return 2
    return 0
