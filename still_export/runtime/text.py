"""Text in, text out: tokenizer, chat format, answers in pieces."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from still_export.package.files import check_hash
from still_export.runtime.base import Progress, Runner
from still_export.runtime.sampling import RunError, Sampling
from still_export.runtime.stop_texts import StopTexts, until


class Text:
    """The package's tokenizer and chat format."""

    def __init__(self, model: Runner) -> None:
        if "tokenizer.json" not in model.manifest["files"]:
            raise RunError(
                f"{model.folder} has no tokenizer.json, as its manifest.json says; pass token ids with --prompt-ids."
            )
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
        """Text of `tokens` as it becomes certain."""
        pieces = TextPieces(self)
        for token in tokens:
            if piece := pieces.push(token):
                yield piece
        if piece := pieces.end():
            yield piece

    def dialogue(self, messages: Sequence[Mapping[str, str]], place: str = "text", ends: bool = True) -> list[int]:
        """Token ids of a chat that the assistant is to answer: messages with "role" and "content".

        Args:
            messages: A system message or none, then user and assistant in turn, a user's last.
            place: What was read before: nothing ("text"), the beginning of the first message here ("user"), an "answer".
            ends: False: the last message goes on.

        Raises:
            RunError: Their order is another, or the package has no chat format.
        """
        said = list(messages)
        system = said.pop(0)["content"] if said and said[0].get("role") == "system" and place == "text" else None
        if [m.get("role") for m in said] != ["user", "assistant"] * (len(said) // 2) + ["user"]:
            raise RunError(
                "messages must be a system message or none, then those of user and assistant in turn, a user's last; "
                f"got {', '.join(str(m.get('role')) for m in messages) or 'none'}."
            )
        chat = self._format()
        parts = ["" if place == "user" else self._before(place, system)]
        for message in said:
            user = message["role"] == "user"
            parts += [message["content"], chat["user_to_assistant" if user else "assistant_to_user"]]
        return self.encode("".join(parts if ends else parts[:-1]), special=False)

    def opening(self, text: str, system: str | None = None) -> list[int]:
        """Token ids of the beginning of a chat whose first message begins with `text` and is not at its end.

        Raises:
            RunError: The package has no chat format, or none for a system message.
        """
        return self.encode(self._before("text", system) + text, special=False)

    def _before(self, place: str, system: str | None) -> str:
        """What the chat format puts before a user's message."""
        chat = self._format()
        if place == "answer":
            return str(chat["assistant_to_user"])
        if system is None:
            return str(chat["start"])
        if "system_start" not in chat:
            raise RunError("this model's chat format has no system message. Leave it out.")
        return str(chat["system_start"] + system + chat["system_to_user"])

    def _format(self) -> Mapping[str, str]:
        if not self.chat:
            raise RunError("this package has no chat format: its model has no chat template. Use --prompt.")
        return self.chat


class TextPieces:
    """The text of tokens that come one by one, as it becomes certain: never half a character."""

    # A token's text depends on those before it (a leading space, half a character): decoded together with the piece before.

    def __init__(self, text: Text) -> None:
        self._decode = text.tokenizer.decode
        self._seen: list[int] = []
        self._shown = 0  # of the seen tokens, those whose text was given

    def push(self, token: int) -> str:
        """What is certain with this token; may be empty."""
        self._seen.append(token)
        piece = self.end()
        if not piece or piece.endswith("\ufffd"):
            return ""
        self._seen, self._shown = self._seen[self._shown :], len(self._seen) - self._shown
        return piece

    def end(self) -> str:
        """What is left, complete or not."""
        known, text = self._decode(self._seen[: self._shown]), self._decode(self._seen)
        return text[len(known) :]


class Answer:
    """The continuation of a prompt, in pieces of text as they come; complete once it was iterated to its end, or closed.

    Args:
        model: Its runner.
        text: The tokenizer; None: token ids with spaces.
        prompt: Token ids to read first.
        count: Tokens at most.
        sampling: How they are chosen.
        stop: Texts that end the answer; not part of it.
        stopped: Asked before every token whether the answer shall end here.
        cached: Tokens before `prompt` that the model has read already, and that belong to it.
        before: Those, for guesses.

    Attributes:
        tokens: Generated so far. ended: "end" (the model's own), "length", "stop" or "interrupted".
        cached_tokens: Of the prompt, those that had been read. whole: It came to its end, and was not given up.
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
    ) -> None:
        stops = StopTexts(stop)
        self.tokens: list[int] = []
        self.ended, self.whole = "end", False
        self.prompt_tokens, self.cached_tokens = len(prompt) + cached, cached
        self._written: list[str] = []
        self._times: list[float] = []
        self._begin = time.perf_counter()
        self._pieces = self._made(model, text, prompt, count, sampling, stops, progress, stopped, before)
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
    ) -> Iterator[str]:
        def tokens() -> Iterator[int]:
            ends = model.manifest["eos_token_ids"]
            for token in model.generate(prompt, count, sampling, ends, progress, before):
                self._times.append(time.perf_counter())
                self.tokens.append(token)
                self.ended = "length" if len(self.tokens) == count else "interrupted"
                yield token
                if stopped():
                    return
            if len(self.tokens) < count:
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
        """What was written so far."""
        return "".join(self._written)

    @property
    def first_token_s(self) -> float:
        """From the request to the first token; without one, to now."""
        return (self._times[0] if self._times else time.perf_counter()) - self._begin

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens a second behind the first one."""
        times = self._times
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can hold."""
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
    """Write an answer to `stream` (None: nowhere) as it comes."""
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
