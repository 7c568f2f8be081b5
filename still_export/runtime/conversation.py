"""A chat over several turns: messages, what the model has read, and dropping the oldest turns at the end of the capacity.

Exports copy this file into packages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from still_export.package.chat_format import Message
from still_export.runtime.base import Runner
from still_export.runtime.decoding import Progress
from still_export.runtime.prefixes import PrefixCache, Reader, alike
from still_export.runtime.sampling import RunError, Sampling
from still_export.runtime.text import Answer, Text, write_answer

if TYPE_CHECKING:
    from still_export.runtime.snapshot import Snapshot


class FullError(RunError):
    """The conversation and the next answer exceed the package's capacity; dropping the `turns` oldest turns makes room."""

    def __init__(self, turns: int, capacity: int) -> None:
        self.turns = turns
        super().__init__(
            f"the conversation is at the end of this package's capacity of {capacity} tokens; without its {turns} oldest "
            f"turn{'s' if turns > 1 else ''} it can go on (--when-full drop)."
        )


class Conversation:
    """Messages to a model and its answers. The model's template renders the whole chat each time; the model reads only tokens after the
    longest prefix in its state or in the cache.

    Args:
        model: Started by the conversation.
        text: Its tokenizer and chat templates.
        tokens: Of an answer at most.
        sampling: How tokens are chosen.
        system: System message.
        stop: Texts that end an answer.
        prefix: State before the first message (see `Text.opening`); it stays.
        prefixes: Caches the states of turns, so that `back` needs no reading.
        arguments: Of the chat template, such as `enable_thinking`.

    Raises:
        RunError: The package has no chat template, or its template accepts no system message.
    """

    def __init__(
        self,
        model: Runner,
        text: Text,
        tokens: int,
        sampling: Sampling,
        system: str | None = None,
        stop: Sequence[str] = (),
        prefix: Snapshot | None = None,
        prefixes: PrefixCache | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.text, self.tokens = model, text, tokens
        self.sampling, self.system, self.stop, self.prefix = sampling, system, stop, prefix
        self.arguments = arguments
        text.opening("", system, arguments)
        self.turns: list[tuple[str, Message]] = []
        """User messages with answers."""
        self._reader = Reader(model, prefixes, prefix)
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        self.turns = []
        self._reader.restart()

    def ask(
        self,
        message: str,
        stream: Any = sys.stdout,
        progress: Progress | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """The answer to a message, written to `stream` as it comes.

        Raises:
            FullError: The oldest turns must go first (`drop`); nothing was read.
            RunError: The message alone is too long.
        """
        prompt = self._prompt(self.turns, message)
        self._check_room(message, len(prompt))
        settled = self._settled(message, prompt) if self._reader.cache else 0
        known, progress = self._reader.begin(prompt, progress, settled)
        answer = Answer(
            self.model,
            self.text,
            prompt[known:],
            self.tokens,
            self.sampling,
            stop=self.stop,
            progress=progress,
            stopped=stopped,
            cached=known,
            before=prompt[:known],
        )
        write_answer(answer, stream)
        self._reader.end(prompt + answer.tokens)
        self.turns.append((message, answer.message))
        return answer

    def drop(self, turns: int) -> None:
        """Forget the `turns` oldest turns; the others are read again with the next message."""
        self.turns = self.turns[turns:]

    def back(self, turns: int = 1) -> None:
        """Forget the `turns` latest turns."""
        self.turns = self.turns[: max(0, len(self.turns) - turns)]

    def _prompt(self, turns: Sequence[tuple[str, Message]], message: str) -> list[int]:
        """Token ids of the chat after the prefix."""
        messages: list[Message] = [m for user, answer in turns for m in ({"role": "user", "content": user}, answer)]
        messages.append({"role": "user", "content": message})
        if self.prefix is not None:
            behind = self.text.dialogue(messages, self.prefix.place, arguments=self.arguments)
            return [*self.prefix.unread, *behind]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return self.text.dialogue(messages, arguments=self.arguments)

    def _settled(self, message: str, prompt: list[int]) -> int:
        """Length of the prefix of `prompt` that stays the same after another turn: templates drop reasoning of earlier answers."""
        return alike(prompt, self._prompt([*self.turns, (message, {"role": "assistant", "content": "."})], "."))

    def _check_room(self, message: str, prompt: int) -> None:
        table = self.model.table
        before = self.prefix.length if self.prefix else 0
        before, rows = self.model.feeding.text_tokens(before), self.model.feeding.length
        if not table.bounded or not self.turns:
            return  # `generate` refuses a single message that is too long
        for gone in range(len(self.turns) + 1):
            size = before + (len(self._prompt(self.turns[gone:], message)) if gone else prompt)
            if rows(size + self.tokens - 1) <= table.capacity_tokens:
                break
        else:  # dropping turns makes no room
            self.model.check_capacity(rows(size + self.tokens - 1))
        if gone:
            raise FullError(gone, table.capacity_tokens)
