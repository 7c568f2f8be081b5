"""Text in, text out: tokenizer, streamed answers, chat, and what the stand-alone programs of packages share."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from still_export.package.files import check_hash
from still_export.package.trust import trust_package
from still_export.runners.base import Progress, Runner
from still_export.runners.sampling import RunError, Sampling


class Text:
    """The package's tokenizer and chat format."""

    def __init__(self, model: Runner) -> None:
        if "tokenizer.json" not in model.manifest["files"]:
            raise RunError(f"{model.folder} has no tokenizer.json; pass token ids with --prompt-ids.")
        path = check_hash(model.folder, model.manifest, "tokenizer.json")
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise RunError(
                "text needs the package tokenizers: pip install tokenizers; or pass --prompt-ids."
            ) from error
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except BaseException as error:  # among them the panics of its Rust side
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise RunError(f"{path} is no tokenizer that can be read: {' '.join(str(error).split())}.") from error
        self.chat = model.manifest.get("chat")

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`; `special` adds what the tokenizer puts around a plain text."""
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """Text of `tokens` as it becomes certain: never half a character."""
        seen: list[int] = []
        shown = ""
        for token in tokens:
            seen.append(token)
            text = self.tokenizer.decode(seen)
            if not text.endswith("\ufffd"):
                yield text[len(shown) :]
                shown = text
        text = self.tokenizer.decode(seen)
        if len(text) > len(shown):
            yield text[len(shown) :]

    def turn(self, message: str, first: bool, system: str | None) -> list[int]:
        """Token ids of a user's message with everything the chat format puts around it."""
        if not self.chat:
            raise RunError("this package has no chat format: its model has no chat template. Use --prompt.")
        if not first:
            before = self.chat["assistant_to_user"]
        elif system is None:
            before = self.chat["start"]
        else:
            before = self.chat["system_start"] + system + self.chat["system_to_user"]
        return self.encode(before + message + self.chat["user_to_assistant"], special=False)


def stream_answer(
    model: Runner,
    text: Text | None,
    prompt: list[int],
    count: int,
    sampling: Sampling,
    stream: Any = sys.stdout,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the continuation of `prompt` to `stream` (or nowhere) as it comes; what was generated, and timings."""
    begin = time.perf_counter()
    times: list[float] = []
    generated: list[int] = []

    def tokens() -> Iterator[int]:
        for token in model.generate(prompt, count, sampling, model.manifest["eos_token_ids"], progress):
            times.append(time.perf_counter())
            generated.append(token)
            yield token

    written = []
    for piece in (f"{t} " for t in tokens()) if text is None else text.stream(tokens()):
        written.append(piece)
        if stream is not None:
            stream.write(piece)
            stream.flush()
    if stream is not None:
        stream.write("\n")
    first = times[0] - begin if times else time.perf_counter() - begin
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
    return {
        "prompt_tokens": len(prompt),
        "tokens": generated,
        "text": "".join(written),
        "first_token_s": round(first, 4),
        "decode_tokens_per_s": round(rate, 2),
    }


def chat(model: Runner, text: Text, count: int, sampling: Sampling, system: str | None) -> None:
    """Talk until the input ends."""
    first = True
    unread: list[int] = []
    while True:
        try:
            message = input("> ")
        except EOFError:
            return
        prompt = unread + text.turn(message, first, system)
        answer = stream_answer(model, text, prompt, count, sampling)["tokens"]
        # Of an answer that was cut off the model has not seen the last token.
        unread = answer[-1:] if len(answer) == count else []
        first = False


def token_ids(text: str) -> list[int]:
    """Token ids written with commas between them; raises ValueError."""
    return [int(x) for x in text.split(",")]


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
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, help="0 = all (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 = all (default)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--trust-native", action="store_true", help="load native code that this machine did not build, and remember it"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    add_options(parser)
    options = parser.parse_args()
    try:
        if options.trust_native:
            trust_package(options.folder)
        sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
        model = open_runner(options)
        model.start()
        if options.prompt_ids:
            stream_answer(model, None, options.prompt_ids, options.tokens, sampling)
            return 0
        text = Text(model)
        if options.chat:
            chat(model, text, options.tokens, sampling, options.system)
        else:
            stream_answer(model, text, text.encode(options.prompt), options.tokens, sampling)
    except failures as error:
        if options.debug:
            raise
        print(f"error: {error or 'out of memory'}", file=sys.stderr)
        return 2
    return 0
