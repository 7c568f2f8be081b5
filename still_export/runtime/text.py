"""Text in, text out: tokenizer, chat format, answers in pieces."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from still_export.package.chat_format import ChatFormat, Message, read_format
from still_export.package.files import check_hash
from still_export.package.tokenizer_bounds import guarded, load_tokenizer
from still_export.runtime.base import Runner
from still_export.runtime.decoding import Progress
from still_export.runtime.reasoning import Reasoning
from still_export.runtime.sampling import RunError, Sampling
from still_export.runtime.stop_texts import StopTexts, until

NO_MARKS: Mapping[int, str] = {}
TAIL = 32
"""Last tokens that are examined: of a prompt for the mark that opens reasoning, of an answer for the context of the next token's text."""
UNFINISHED = 3
"""Most bytes, and so tokens, of an incomplete character."""


class TextAhead:
    """A package's `Text`, loaded in a thread while the session opens; both take equally long."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder, self.manifest = folder, dict(manifest)
        self._found: Text | Exception | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            self._found = Text(self)
        except Exception as error:  # token ids need none
            self._found = error

    def get(self) -> Text:
        """The text; RunError where the package has none."""
        self._thread.join()
        if not isinstance(self._found, Text):
            raise self._found or RunError(f"{self.folder}: the tokenizer was not read.")
        return self._found


class Text:
    """The package's tokenizer and chat templates (`chat`; None: it has none)."""

    def __init__(self, model: Runner | TextAhead) -> None:
        if "tokenizer.json" not in model.manifest["files"]:
            raise RunError(
                f"{model.folder} has no tokenizer.json, as its manifest.json says; pass token ids with --prompt-ids."
            )
        path = check_hash(model.folder, model.manifest, "tokenizer.json")
        try:
            self.tokenizer = load_tokenizer(path)
        except ImportError as error:
            raise RunError(
                "text needs the package tokenizers: pip install tokenizers; or pass --prompt-ids."
            ) from error
        self.chat = read_format(model.manifest.get("chat"))
        self.ends = frozenset(model.manifest["eos_token_ids"])

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`; `special` adds what the tokenizer puts around a plain text.

        Raises:
            RunError: It has half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError:  # of JSON's escapes, or of bytes of a command line that are no UTF-8
            raise RunError("the text has half of a surrogate pair, which is no character. Give it in UTF-8.") from None
        with guarded("the tokenizer fails on this text"):
            return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """The text of `tokens`; RunError where the tokenizer fails."""
        with guarded("the tokenizer fails on this answer"):
            return str(self.tokenizer.decode(tokens, skip_special_tokens=skip_special))

    def stream(self, tokens: Iterable[int], marks: Mapping[int, str] = NO_MARKS) -> Iterator[str]:
        """Text of `tokens` as it becomes certain; `marks`: see TextPieces."""
        pieces = TextPieces(self, marks)
        for token in tokens:
            if piece := pieces.push(token):
                yield piece
        if piece := pieces.end():
            yield piece

    @cached_property
    def marks(self) -> Mapping[int, str]:
        """Tokens around a model's reasoning, and their texts."""
        texts = (self.chat and self.chat.thoughts) or ()
        return {token: text for text in texts if (token := self.tokenizer.token_to_id(text)) is not None}

    @cached_property
    def special_tokens(self) -> Mapping[int, str]:
        """Special tokens and their texts, without those that end an answer."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {n: token.content for n, token in added.items() if token.special and n not in self.ends}

    def reasoning(self, prompt: Sequence[int]) -> Reasoning:
        """Separates the reasoning of an answer to a chat from its content."""
        thoughts = self.chat.thoughts if self.chat else None
        if thoughts is None:
            return Reasoning(None, False)
        end = self.decode(list(prompt[-TAIL:]), skip_special=False)
        return Reasoning(thoughts, end.rstrip().endswith(thoughts[0]))

    def dialogue(
        self,
        messages: Sequence[Message],
        place: str = "text",
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        goes_on: bool | None = None,
        reply: bool = True,
    ) -> list[int]:
        """Token ids of a chat that the assistant is to answer, as the model's template writes it.

        Args:
            messages: "role" and "content" (a text or text parts), "tool_calls" and "reasoning_content" where there are some.
            place: What was read before: nothing ("text"), the beginning of the first message here ("user"), an "answer".
            tools: JSON schemas of functions, as OpenAI's API has them.
            arguments: Of the template, such as `enable_thinking`.
            goes_on: The last message goes on; None: where it is the assistant's.
            reply: End with what begins the assistant's answer.

        Raises:
            RunError: The template refuses them, or the package has none.
        """
        chat = self.format()
        options: dict[str, Any] = {"tools": tools, "arguments": arguments}
        if goes_on is None:
            goes_on = bool(messages) and messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls")
        if place != "text":
            return self.encode(chat.render_behind(messages, place, goes_on=goes_on, **options), special=False)
        if goes_on:
            return self.encode(chat.render_open(messages, **options), special=False)
        return self.encode(chat.render(messages, **options, reply=reply), special=False)

    def opening(self, text: str, system: str | None = None, arguments: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of the beginning of a chat whose first message begins with `text` and continues.

        Raises:
            RunError: The package has no chat template, or it has no system message.
        """
        return self.encode(self.format().opening(system, arguments=arguments) + text, special=False)

    def format(self) -> ChatFormat:
        """The chat templates; RunError where the package has none."""
        if not self.chat:
            raise RunError("this package has no chat format: its model has no chat template. Use --prompt.")
        return self.chat


class TextPieces:
    """Turns tokens that arrive one by one into text, without incomplete characters.

    Args:
        text: Its tokenizer.
        marks: Tokens whose texts are shown although they are special.
    """

    # A token's text depends on earlier ones (a leading space, half a character), so it is decoded together with the piece before.

    def __init__(self, text: Text, marks: Mapping[int, str] = NO_MARKS) -> None:
        self._decode, self._marks = text.decode, marks
        self._seen: list[int] = []
        self._shown = 0  # number of seen tokens whose text was returned

    def push(self, token: int) -> str:
        """Text that is certain with this token; may be empty."""
        if token in self._marks:
            piece, self._shown = self.end(), len(self._seen)
            return piece + self._marks[token]
        self._seen.append(token)
        piece, pending = self.end(), 0
        if piece.endswith("\ufffd"):
            pending = self._unfinished(piece)
            piece = piece[:-1] if pending else piece
        if pending == len(self._seen) - self._shown:
            return ""
        if not piece:  # a special token, or white space at the beginning
            self._seen = self._seen[-TAIL:]
            self._shown = len(self._seen) - pending
            return ""
        self._seen, self._shown = self._seen[self._shown :], len(self._seen) - self._shown - pending
        return piece

    def _unfinished(self, piece: str) -> int:
        """Number of last tokens that may begin an incomplete character, whose placeholder `piece` ends with."""
        waiting = len(self._seen) - self._shown
        if waiting <= UNFINISHED:
            return waiting
        whole = self._decode(self._seen)
        return next((n for n in range(1, UNFINISHED + 1) if self._decode(self._seen[:-n]) == whole[:-1]), 0)

    def end(self) -> str:
        """The remaining text, complete or not."""
        known, text = self._decode(self._seen[: self._shown]), self._decode(self._seen)
        return text[len(known) :]


class Calls(Protocol):
    """Separates tool calls from content; `ToolCalls` is one."""

    def push(self, text: str) -> str: ...
    def end(self) -> tuple[str, list[dict[str, Any]]]: ...


class Answer:
    """The continuation of a prompt, generated in pieces of text while it is iterated; complete at its end, or when closed.

    Args:
        model: Its runner.
        text: The tokenizer; None: token ids with spaces.
        prompt: Token ids to read first.
        count: Tokens at most.
        sampling: How they are chosen.
        stop: Texts that end the answer; not part of it.
        stopped: Called before every token; True ends the answer.
        cached: Number of tokens of the prompt before `prompt`, which the model has already read.
        before: These tokens, for guesses.
        turn: Of the caller that set the model's state for it (see `Turns`); None: it begins now.
        calls: Makes a separator of tool calls and content; None: there are no tools.

    Attributes:
        tokens: Generated so far.
        sampling: With the tokens' log-probabilities, if they are asked for.
        ended: "end" (the model's own), "length", "stop" or "interrupted".
        cached_tokens: Tokens of the prompt that were not read again. whole: It reached its end.
    """

    def __init__(
        self,
        model: Runner,
        text: Text | None,
        prompt: list[int],
        count: int,
        sampling: Sampling,
        *,
        stop: Sequence[str] = (),
        progress: Progress | None = None,
        stopped: Callable[[], bool] = lambda: False,
        cached: int = 0,
        before: Sequence[int] = (),
        turn: int | None = None,
        calls: Callable[[], Calls] | None = None,
    ) -> None:
        stops = StopTexts(stop)
        self.sampling, self._calls = sampling, calls
        self.tokens: list[int] = []
        self.ended, self.whole = "end", False
        self.prompt_tokens, self.cached_tokens = len(prompt) + cached, cached
        self._written: list[str] = []
        self._times: list[float] = []
        self._begin = time.perf_counter()
        self._text, self._prompt, self._stop = text, [*before, *prompt], stop
        turn = model.turns.take() if turn is None else turn
        self._pieces = self._made(model, text, prompt, count, sampling, stops, progress, stopped, before, turn)
        self._speculation = model.speculation

    def _made(
        self,
        model: Runner,
        text: Text | None,
        prompt: list[int],
        count: int,
        sampling: Sampling,
        stops: StopTexts,
        progress: Progress | None,
        stopped: Callable[[], bool],
        before: Sequence[int],
        turn: int,
    ) -> Iterator[str]:
        def tokens() -> Iterator[int]:
            ends = model.manifest["eos_token_ids"]
            for token in model.generate(prompt, count, sampling, ends, progress, before, turn):
                self._times.append(time.perf_counter())
                self.tokens.append(token)
                self.ended = "length" if len(self.tokens) == count else "interrupted"
                yield token
                if stopped():
                    return
            if len(self.tokens) < count or sampling.ended:
                self.ended = "end"

        pieces = (f"{t} " for t in tokens()) if text is None else text.stream(tokens())
        for piece in until(pieces, stops):
            self._written.append(piece)
            yield piece
        if stops.found:
            self.ended = "stop"
        self.whole = True

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._written)

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message so far, for the next turn of a chat: reasoning and tool calls, if any, apart from its content."""
        if self._text is None:
            return {"role": "assistant", "content": self.text}
        split, calls = self._text.reasoning(self._prompt), self._calls() if self._calls else None
        marks = self._text.marks if calls is None else {**self._text.special_tokens, **self._text.marks}
        pieces = until(self._text.stream(self.tokens, marks), StopTexts(self._stop))
        parts = [*map(split.push, pieces), split.end()]
        thought, content = ("".join(part) for part in zip(*parts, strict=True))
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls is not None:
            before = calls.push(content)
            rest, found = calls.end()
            message = {**message, "content": before + rest, **({"tool_calls": found} if found else {})}
        return {**message, "reasoning_content": thought} if thought else message

    @property
    def first_token_s(self) -> float:
        """Seconds from the request to the first token, or to now."""
        return (self._times[0] if self._times else time.perf_counter()) - self._begin

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens a second after the first one."""
        times = self._times
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As values of JSON."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "tokens": self.tokens,
            "text": self.text,
            "ended": self.ended,
            "first_token_s": round(self.first_token_s, 4),
            "decode_tokens_per_s": round(self.decode_tokens_per_s, 2),
            **({} if self._speculation is None else {"speculation": self._speculation.to_dict()}),
        }


def write_answer(answer: Answer, stream: Any = sys.stdout) -> Answer:
    """Write an answer to `stream` (None: discard) as it is generated."""
    for piece in answer:
        if stream is not None:
            stream.write(piece)
            stream.flush()
    if stream is not None:
        stream.write("\n")
    return answer


def token_ids(text: str) -> list[int]:
    """Token ids written with commas between them; raises ValueError."""
    return [int(x) for x in text.split(",")]
