"""The proof of a head that guesses tokens ahead (MTP): its logits and states against PyTorch, on the hidden states of the runtime's
model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from still_export.mixers.cache import empty_states
from still_export.models.base import last_rows
from still_export.models.step import decode_with_state
from still_export.package.calls import Arrays
from still_export.proof.cases import Case, errors_of
from still_export.proof.codes import as_numbers
from still_export.proof.sessions import Session
from still_export.proof.verdict import Check
from still_graphs.states import AHEAD
from still_kernels.forms import pytorch_forms
from still_kernels.ties import Pairs

ROUNDS = 6
"""Rounds of guesses; in each, some guesses are accepted."""
LOGITS, READ = f"{AHEAD}logits", f"{AHEAD}read"
"""Outputs compared besides the head's states: its logits, and the logits of the hidden states that it reads."""
NEAR = 8.0
"""Two experts are a near tie if their scores differ by at most this many times PyTorch's own rounding error."""


@dataclass
class _Row:
    """One sequence in the runtime: tokens read, their hidden states, rounds (tokens read so far, guesses, the head's logits), and the
    model's own last logits with the place of their first token."""

    tokens: list[int] = field(default_factory=list)
    hidden: list[np.ndarray] = field(default_factory=list)
    rounds: list[tuple[int, list[int], np.ndarray]] = field(default_factory=list)
    read: tuple[int, np.ndarray] = (0, np.zeros(0))


class HeadCases:
    """Random calls of a head, compared with PyTorch.

    Args:
        right, own: Load the head in PyTorch: in a wider type than the package's, and in the package's own.
        chunk: Lengths are drawn around multiples of this.
    """

    def __init__(self, right: Callable[[], Any], own: Callable[[], Any], chunk: int, seed: int = 0) -> None:
        self.right, self.own = right, own
        self.lengths, self.random = (chunk + 5, 1, 2 * chunk - 1), np.random.default_rng(seed)

    def judged(self, session: Session) -> tuple[Case, Pairs, Check]:
        """Returns (case, outputs, one pair for each sequence, check on how many logits were compared)."""
        pairs: Pairs = []
        own: list[Arrays] = []
        sums: dict[str, list[float]] = {}
        compared = rows = 0
        runs = self._run(session)
        answers = []
        for read in (self.right, self.own):
            model = read()  # one of them at a time is in memory
            answers.append([self._answers(model, row, states) for row, states in runs])
            del model
        for (row, states), (right, margins), (own_answers, own_margins) in zip(runs, *answers, strict=True):
            found = {LOGITS: np.concatenate([x for _, _, x in row.rounds])[None], READ: row.read[1][None], **states}
            right, own_answers, found = (as_numbers(x) for x in (right, own_answers, found))
            if margins is not None and own_margins is not None:
                error = NEAR * np.abs(margins - own_margins).max()
                tied = np.abs(margins).reshape(len(margins), -1).min(-1) <= error
                for each in (own_answers, found):
                    each[LOGITS] = np.where(tied[None, :, None], right[LOGITS], each[LOGITS])
                compared -= int(tied.sum())
            compared, rows = compared + right[LOGITS].shape[1], rows + right[LOGITS].shape[1]
            pairs.append((right, found))
            own.append({})
            for name, expected in right.items():
                errors, total = errors_of(expected, own_answers[name])
                own[-1][name] = errors.astype(np.float32)
                sums.setdefault(name, []).append(total / max(expected.size, 1))
        case = Case("head, guessed", [], [expected for expected, _ in pairs], own=own)
        case.own_mean = {name: float(np.mean(each)) for name, each in sums.items()}
        return (
            case,
            pairs,
            Check("the head's logits", compared > 0, f"{rows - compared} of {rows} behind a router's near tie"),
        )

    def _run(self, session: Session) -> list[tuple[_Row, Arrays]]:
        """Run prompts and guesses on the runtime; returns (sequence, the head's states) pairs."""
        model, random = session.model, self.random
        head, vocabulary = model.head, int(model.manifest["model"]["vocab_size"])
        count = min(len(self.lengths), model.most_rows or len(self.lengths))
        rows = [_Row() for _ in range(count)]
        add: Callable[..., None] = head.add

        def record(first: int, tokens: np.ndarray, counts: np.ndarray, hidden: np.ndarray) -> None:
            for number, length in enumerate(counts):
                rows[first + number].tokens += tokens[number, :length].tolist()
                rows[first + number].hidden += [*hidden[number, :length].copy()]
            add(first, tokens, counts, hidden)

        def drawn(*shape: int) -> np.ndarray:
            return random.integers(vocabulary, size=shape)

        head.add = record
        try:
            model.start(count)
            lengths = np.array(self.lengths[:count])
            half = lengths // 2
            model.feed(drawn(count, int(half.max(initial=1))), half)
            model.feed(drawn(count, int((lengths - half).max())), lengths - half)
            for turn in range(ROUNDS):
                following = drawn(count, 1 + model.guesses)
                for number, row in enumerate(rows):
                    guesses = [int(following[number, 0]), *drawn(model.guesses - 1).tolist()]
                    logits = [head.begin(number, guesses[0]), *map(head.go_on, guesses[1:])]
                    row.rounds.append((len(row.tokens), guesses, np.array(logits)))
                if turn == ROUNDS // 2:
                    model.step(following[:, 0])
                    continue
                answers = model.guess(following)
                accepted = random.integers(turn == 0, 2 + model.guesses, count)
                for row, logits, number in zip(rows, answers, accepted, strict=True):
                    row.read = (len(row.tokens), logits[:number]) if number else row.read
                model.accept(accepted)
            states = [
                {f"present_{name}": array for name, array in model.take(number).items() if name.startswith(AHEAD)}
                for number in range(count)
            ]
        finally:
            del head.add
        return list(zip(rows, states, strict=True))

    @torch.no_grad()
    def _answers(self, model: Any, row: _Row, states: Arrays) -> tuple[Arrays, np.ndarray | None]:
        """Returns (PyTorch's logits and states for one sequence, margins of its routers by logit or None)."""
        watched: list[Tensor] = []
        routers = [module for module in model.modules() if hasattr(module, "watch")]
        for module in routers:
            module.watch = lambda margins: watched.append(margins[:, -1].double())
        hidden = torch.tensor(np.array(row.hidden))[None]
        tokens = torch.tensor(row.tokens)[None]
        empty = empty_states(model.config, 1, model.dtype, len(row.tokens) + len(row.rounds[0][1]))

        def call(ids: Tensor, made: Tensor, past: int, before: list[dict[str, Tensor]]) -> Any:
            watched.clear()
            new, length = torch.tensor([ids.shape[1]]), torch.tensor([past])
            copies = [{name: x.clone() for name, x in layer.items()} for layer in before]
            every, after = decode_with_state(model, ids, new, length, copies, hidden=made)
            last = last_rows(every, new, 1)
            return model.logits(last)[0].double().numpy(), last, after, [x.numpy() for x in watched]

        with pytorch_forms():
            cache = call(tokens[:, 1:], hidden[:, :-1], 0, empty)[2] if len(row.tokens) > 1 else empty
            logits, margins = [], []
            for length, guesses, _ in row.rounds:
                made, after = hidden[:, length - 1 : length], cache
                for number, token in enumerate(guesses):
                    found = call(torch.tensor([[token]]), made, length - 1 + number, after)
                    logits.append(found[0])
                    _, made, after, seen = found
                    margins.append(np.concatenate([x.ravel() for x in seen]) if seen else np.zeros(0))
        for module in routers:
            module.watch = None
        layers = int(next(iter(states)).rpartition(".")[2])
        found = {LOGITS: np.concatenate(logits)[None]}
        for number, layer in enumerate(cache):
            for name, x in layer.items():
                output = f"present_{AHEAD}{name}.{layers + number}"
                found[output] = (x.float() if x.dtype == torch.float64 else x).numpy()[:, :, : len(row.tokens) - 1]
        last = f"present_{AHEAD}hidden.{layers}"
        found[last] = np.array(row.hidden[-1:])
        begin, read_logits = row.read
        found[READ] = model.logits(hidden[:, begin : begin + len(read_logits)].to(model.dtype)).double().numpy()
        return found, np.array(margins) if margins[0].size else None
