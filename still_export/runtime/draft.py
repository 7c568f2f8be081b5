"""A draft model: a smaller one whose likeliest tokens are the guesses of another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from still_export.runtime.base import Runner
from still_export.runtime.sampling import NO_TOKEN, RunError, likeliest
from still_export.runtime.speculation import Guessed, Speculation
from still_export.runtime.text import Text


class Draft:
    """Guesses for any number of sequences, one at a time.

    Args:
        runner: Of the draft's package, for one sequence.
        vocabulary: Tokens of the model that it guesses for.
    """

    def __init__(self, runner: Runner, vocabulary: int) -> None:
        self.runner, self.vocabulary = runner, vocabulary
        runner.start()
        self._last: Drafted | None = None

    def guesser(self, tokens: Sequence[int], sequence: int = 0) -> Drafted:
        """A guesser for a sequence that begins with `tokens`; the prefix it shares with the latest one is not read again."""
        new, last = Drafted(self, tokens), self._last
        if last is not None and new.tokens[: last.read] == last.tokens[: last.read]:
            new.read, new.state = last.read, last.state
        self._last = new
        return new


class Drafted(Guessed):
    """What a draft has read of a sequence, with the state after it; its own guesses leave no trace."""

    def __init__(self, draft: Draft, tokens: Sequence[int]) -> None:
        super().__init__(tokens)
        self.draft, self.read = draft, 0
        self.state: dict[str, np.ndarray] = {}

    def sure(self) -> int | None:
        """Like Guesser; None at the end of the draft's capacity."""
        table = self.draft.runner.table
        return None if table.bounded and len(self.tokens) >= table.capacity_tokens else 0

    def guess(self, most: int) -> list[int]:
        runner, vocabulary = self.draft.runner, self.draft.vocabulary
        if runner.table.bounded:
            most = min(most, runner.table.capacity_tokens - len(self.tokens) + 1)
        runner.put(0, self.state, self.read)
        logits = runner.prefill(self.tokens[self.read :])
        self.read, self.state = len(self.tokens), {name: array.copy() for name, array in runner.take().items()}
        guesses: list[int] = []
        while (token := int(likeliest(logits[:vocabulary]))) != NO_TOKEN:
            guesses.append(token)
            if len(guesses) == most:
                break
            logits = runner.step(np.array([token]))[0]
        self.guesses = guesses
        return guesses


def demand_guesses(model: Runner) -> None:
    """Raise RunError if `model` accepts no guesses."""
    if not model.guesses:
        raise RunError(f"{model.folder} accepts no guesses: export it with --speculate for ONNX Runtime or TensorRT.")


def open_draft(model: Runner, draft: Runner) -> Speculation:
    """Let the model `draft` guess for `model`.

    Raises:
        RunError: `model` accepts no guesses, `draft` makes none, or they have different tokenizers.
    """
    demand_guesses(model)
    if draft.feeding.every or draft.feeding.whole_prompts:
        raise RunError(
            f"the draft {draft.folder} inserts tokens of its own, or needs whole prompts. Give another draft with --guess."
        )
    if Text(model).tokenizer.get_vocab() != Text(draft).tokenizer.get_vocab():
        raise RunError(
            f"the draft {draft.folder} has another tokenizer than {model.folder}: its tokens mean something else. "
            "Give a package of a model of the same family."
        )
    return Speculation(model.guesses, Draft(draft, model.manifest["model"]["vocab_size"]).guesser)
