"""A chat that goes on: what was said, what the model has read of it, and the oldest turns that make room at the end of the capacity.

Exports copy this file into packages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from still_export.runtime.base import Progress, Runner
from still_export.runtime.prefixes import PrefixCache, Reader
from still_export.runtime.sampling import RunError, Sampling
from still_export.runtime.text import Answer, Text, write_answer

if TYPE_CHECKING:
    from still_export.runtime.snapshot import Snapshot


class FullError(RunError):
    """The conversation and the next answer exceed the package's capacity; `turns` of the oldest ones would have to go."""

    def __init__(self, turns: int, capacity: int) -> None:
        self.turns = turns
        super().__init__(
            f"the conversation is at the end of this package's capacity of {capacity} tokens; without its {turns} oldest "
            f"turn{'s' if turns > 1 else ''} it can go on."
        )


class Conversation:
    """Messages to a model and its answers; each message is read behind what the model has read already.

    Args:
        model: Started by the conversation.
        text: Its tokenizer and chat format.
        tokens: Of an answer at most.
        sampling: How tokens are chosen.
        system: System message.
        stop: Texts that end an answer.
        prefix: What was read before the first message, as of `Text.opening`; it is kept.
        prefixes: Keeps the states of turns, so that none is read again after `back`.

    Raises:
        RunError: The package has no chat format, or none for a system message: said before anyone types one.
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
    ) -> None:
        self.model, self.text, self.tokens = model, text, tokens
        self.sampling, self.system, self.stop, self.prefix = sampling, system, stop, prefix
        text.opening("", system)
        self.turns: list[tuple[str, list[int]]] = []
        """Each message with the tokens of its answer."""
        self._said: list[int] = []
        """Tokens of all turns, behind the prefix."""
        self._reader = Reader(model, prefixes, prefix)
        self.reset()

    def reset(self) -> None:
        """Forget everything that was said."""
        self._retell([])
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
        prompt = self._said + self._turn(message, first=not self.turns)
        self._check_room(message, len(prompt))
        known, told = self._reader.begin(prompt, progress)
        answer = Answer(
            self.model,
            self.text,
            prompt[known:],
            self.tokens,
            self.sampling,
            stop=self.stop,
            progress=told,
            stopped=stopped,
            cached=known,
            before=prompt[:known],
        )
        write_answer(answer, stream)
        self._said = prompt + answer.tokens
        self._reader.end(self._said)
        self.turns.append((message, answer.tokens))
        return answer

    def drop(self, turns: int) -> None:
        """Forget the `turns` oldest turns; the others are read again with the next message."""
        self._retell(self.turns[turns:])

    def back(self, turns: int = 1) -> None:
        """Forget the `turns` latest turns."""
        self._retell(self.turns[: max(0, len(self.turns) - turns)])

    def _retell(self, turns: list[tuple[str, list[int]]]) -> None:
        self.turns, self._said = [], list(self.prefix.unread) if self.prefix else []
        for message, answer in turns:
            self._said += self._turn(message, first=not self.turns) + answer
            self.turns.append((message, answer))

    def _turn(self, message: str, first: bool) -> list[int]:
        messages = [{"role": "user", "content": message}]
        if not first:
            return self.text.dialogue(messages, "answer")
        if self.prefix is not None:
            return self.text.dialogue(messages, self.prefix.place)
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return self.text.dialogue(messages)

    def _check_room(self, message: str, prompt: int) -> None:
        table = self.model.table
        before = self.prefix.length if self.prefix else 0
        before, rows = self.model.feeding.given(before), self.model.feeding.length
        needed = rows(before + prompt + self.tokens - 1)
        if not table.bounded or needed <= table.capacity_tokens or not self.turns:
            return  # one message that is too long is refused by `generate`
        for gone in range(1, len(self.turns) + 1):
            kept = self.turns[gone:]
            size = before + len(self.prefix.unread if self.prefix else ())
            size += sum(len(self._turn(m, first=not i)) + len(a) for i, (m, a) in enumerate(kept))
            size += len(self._turn(message, first=not kept))
            if rows(size + self.tokens - 1) <= table.capacity_tokens or gone == len(self.turns):
                raise FullError(gone, table.capacity_tokens)
