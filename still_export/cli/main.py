"""The still-export command: verbs, exit codes, errors."""

from __future__ import annotations

import atexit
import difflib
import functools
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer

import still_export
from still_export.cli.errors import (
    INTERRUPTS,
    USAGE,
    as_typed,
    complain,
    complain_interrupted,
    end_at_lost_pages,
    usage,
)
from still_export.errors import ConfigError, ModelNotFoundError, StillExportError
from still_export.extras import EXTRAS, demand, installation
from still_export.folders.sources import local, look
from still_export.package.refusals import RunError
from still_export.package.staging import lacks_room
from still_export.texts.files import read_text


def _version(flag: bool) -> None:
    if flag:
        print(f"still-export {still_export.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


PLAIN: dict[str, Any] = {}
RECIPE: dict[str, Any] = {
    "records": ("still_export.linearization.recipe.Recipe",),
    "without": ("base", "texts"),
    "finders": True,
}
LOAD = "still_export.runtime.options.LoadOptions"
MODEL = ("still_export.graph.options.ExportOptions", "still_export.mixers.choices.StillChoices")
VERBS: dict[str, dict[str, Any]] = {
    "export": {"records": MODEL, "targets": True},
    "lower": {"targets": True},
    "build": {"records": ("still_export.engines.build.BuildOptions",)},
    "verify": {"records": ("still_export.proof.package.VerifyOptions",)},
    "bench": {"records": ("still_export.evaluation.bench.BenchOptions",)},
    "prove": {"records": ("still_export.evaluation.prove.ProveOptions",)},
    "evaluate": {"records": ("still_export.evaluation.evaluate.EvaluationOptions",)},
    "run": {"records": ("still_export.runtime.options.AnswerOptions", "still_export.runtime.sampling.Sampling", LOAD)},
    "serve": {"records": ("still_export.serving.options.ServeOptions", LOAD)},
    "inspect": PLAIN,
    "linearize": RECIPE,
    "doctor": PLAIN,
    "cache": PLAIN,
}
"""Verbs (a file each, with a function of its name), and the records that define their further flags."""

PANELS = {
    "Use": ("run", "serve", "inspect", "doctor", "cache"),
    "Make": ("export", "lower", "build", "kernels"),
    "Prove and measure": ("verify", "prove", "bench", "evaluate"),
    "Train": ("linearize",),
}
"""Verbs by purpose, in the order of the help."""


WIDE = 100
"""Columns from which tables of flags have room for names and texts; narrower, help is plain paragraphs."""


@functools.cache  # otherwise each call of `main` in a process builds all verbs again
def app(verb: str = "", alone: bool = False) -> typer.Typer:
    """The command line. Only `verb` gets its flags from records, which need seconds of imports.

    `alone`: add no other verb; their files and flags are a tenth of the time to the first token.
    """
    from still_export.cli import kernels
    from still_export.cli.flags import add_verb

    made = typer.Typer(
        name="still-export",
        help="Export linearized LLMs to ONNX and TensorRT with their state, and prove every target against PyTorch.\n\n"
        "still-export MODEL --to onnx -o DIR is short for still-export export MODEL --to onnx -o DIR. "
        "--debug, with any verb, shows the traceback of an error.",
        no_args_is_help=True,
        add_completion=False,  # its options need to know the calling shell and fail without one
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode="markdown" if verb not in VERBS or shutil.get_terminal_size().columns >= WIDE else None,
    )
    made.callback()(_root)
    for file, panel in [(file, panel) for panel, files in PANELS.items() for file in files]:
        if alone and file != verb:
            continue
        if file == "kernels":
            kernels.register(made, panel)
            continue
        module, name, flags = import_module(f"still_export.cli.{file}"), file.replace("_", "-"), VERBS[file]
        function, examples = getattr(module, file), getattr(module, "EXAMPLES", None)
        if flags is PLAIN:
            made.command(name, epilog=examples, rich_help_panel=panel)(function)
        else:  # a recipe's flags cost no imports
            add_verb(made, function, examples, verb == name or flags is RECIPE, panel, **flags)
    return made


READ = (
    *(
        "--prompt-file",
        "--load-state",
        "--calls",
        "--calibrate",
        "--follow",
        "--beside",
        "--config",
        "--text",
        "--chat-file",
    ),
    "--reuse",
)
"""Flags that name a file to read, in each verb that has them."""

ROOT_OPTIONS = ("-h", "--help", "--version")
"""Allowed first arguments besides verbs; anything else is the model of an export."""


class _Interrupted(BaseException):
    """Ctrl-C or SIGTERM; not KeyboardInterrupt, which typer would turn into exit code 130."""


def _interrupt(*_: object) -> None:
    raise _Interrupted


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: exit 0 on success, 1 on failure or mismatch, 2 on wrong usage or input.

    An error is one line; with --debug, in any place, its traceback.
    """
    typed = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in typed
    typed = [argument for argument in typed if argument != "--debug"]
    verbs = {file for files in PANELS.values() for file in files}
    if typed and typed[0] not in verbs and typed[0] not in ROOT_OPTIONS:
        near = difflib.get_close_matches(typed[0], verbs, 1)
        if near and not typed[0].startswith("-") and not Path(typed[0]).exists():
            complain("ConfigError", f"{typed[0]} is neither a verb nor a model here. Did you mean {near[0]!r}?")
            sys.exit(2)
        typed.insert(0, "export")
    if threading.current_thread() is threading.main_thread():
        for number in INTERRUPTS:
            signal.signal(number, _interrupt)
        if hasattr(signal, "SIGBUS"):
            end_at_lost_pages()
    try:
        if not {"-h", "--help"} & set(typed):
            typed = _as_files(typed)
            _look_ahead(typed)
        verb = typed[0] if typed else ""
        sys.exit(app(verb, verb in verbs)(typed, standalone_mode=False) or 0)
    except USAGE as error:
        if not typed or verb not in verbs:  # the help, where no verb is given
            error.show()  # type: ignore[attr-defined]
        else:
            complain("ConfigError", as_typed(usage(error, typed), "ConfigError", typed))
    except (StillExportError, RunError) as error:
        if debug:
            raise
        complain(type(error).__name__, as_typed(str(error), type(error).__name__, typed))
    except ImportError as error:
        command = installation(error.name)
        if command is None or debug:
            raise
        complain("MissingPackage", f"this needs the package {str(error.name).split('.')[0]}. Run: {command}")
    except _Interrupted:
        complain_interrupted()
    except MemoryError as error:
        if debug:
            raise
        detail = f": {error}" if str(error) else ""  # NumPy reports size and shape
        complain("OutOfMemory", f"this machine has too little memory{detail}. Use one with more, or a smaller dtype.")
    except BaseException as error:
        # Unforeseen errors, also of libraries: panics of Rust extensions are no Exception. The input may be damaged, or this is a bug.
        if debug or (not isinstance(error, Exception) and type(error).__name__ != "PanicException"):
            raise
        message = " ".join(str(error).split())
        if "can't allocate memory" in message or "bad allocation" in message:
            complain("OutOfMemory", f"this machine has too little memory for the model: {message[-120:]}")
        elif reason := lacks_room(error):  # of any file, or of what reads the output
            scratch = tempfile.gettempdir()
            free = f"{shutil.disk_usage(scratch).free >> 20:,} MiB are free in {scratch}, where temporary files are"
            message = f"a file or the output could not be written: {reason}. Free space, and start again"
            complain("DiskFull", f"{message}; {free} (TMPDIR names another folder).")
        else:
            complain("Unexpected", f"{type(error).__name__}: {message[:300]} (--debug shows where; please report it)")
    sys.exit(2)


def _as_files(words: list[str]) -> list[str]:
    """Copy what READ's flags read from pipes into files: readers check a file before they read it, and seek."""
    files = words.copy()
    for at, (flag, value) in enumerate(_values(words)):
        if flag not in READ or not (value == "-" or Path(value).is_fifo()):
            continue
        copy = tempfile.NamedTemporaryFile(prefix="standard-input-" if value == "-" else "pipe-")
        atexit.register(copy.close)
        with open(sys.stdin.fileno() if value == "-" else value, "rb", closefd=value != "-") as pipe:
            shutil.copyfileobj(pipe, copy)
        copy.flush()
        joined = "=" in words[at]
        files[at if joined else at + 1] = f"{flag}={copy.name}" if joined else copy.name
    return files


def _look_ahead(typed: list[str]) -> None:
    """Look at what a verb is about before its flags are made."""
    words = list(takewhile(lambda word: not word.startswith("-"), typed[1:]))
    if any(not word.strip() for word in words):
        raise ModelNotFoundError(
            f"{typed[0]}: an argument is an empty text. Give a model or a folder; . is the current one."
        )
    for flag, value in _values(typed[1:]):
        if flag in READ and value and not Path(value).expanduser().exists():
            raise ConfigError(f"{flag} {value}: there is no such file.")
    if typed[:1] == ["evaluate"]:  # its flags need torch
        from still_export.folders.model import check_model

        if any(word.partition("=")[0] == "--report" for word in typed):
            demand(*EXTRAS["report"])
        for model in words:
            if "://" not in model and look(model).kind not in ("package", "adapter"):
                check_model(model)
        looks: dict[str, Callable[[str], object]] = {
            "--text": lambda name: read_text(Path(name)),
            "--teacher": check_model,
            "--tokenizer": local,
        }
        for flag, value in _values(typed[1:]):
            if flag in looks and value:
                looks[flag](value)


def _values(words: list[str]) -> Iterator[tuple[str, str]]:
    """(flag, value) pairs."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        flag, joined, value = word.partition("=")
        yield flag, value if joined else following


if __name__ == "__main__":
    main()
