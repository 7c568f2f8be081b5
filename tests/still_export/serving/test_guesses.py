"""With guessed tokens an answer is what it is without, whoever guesses, alone and beside others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import still_export
from still_export.loading.language_model import LanguageModel
from still_export.runtime.draft import Draft, open_draft
from still_export.runtime.ort import OrtModel
from still_export.runtime.prefixes import PrefixCache
from still_export.runtime.sampling import RunError, Sampling
from still_export.runtime.speculation import Speculation
from still_export.runtime.text import Text
from still_export.serving.metrics import Metrics
from still_export.serving.scheduler import Scheduler
from tests.still_export.serving.test_scheduler import IDS, Case, Client, answers

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.slow

CASES = [
    Case(0, 9, 40),
    Case(3, 30, 25, seed=1),
    Case(11, 2, 33, arrives=2),
    Case(0, 50, 20, seed=2, arrives=5),
    Case(40, 17, 30, arrives=9),
]


class Told:
    """Guesses from a list of right answers, of which some are spoilt."""

    def __init__(self, right: Sequence[Sequence[int]], tokens: Sequence[int]) -> None:
        self.known, self.tokens = right, list(tokens)
        self.random = np.random.default_rng(len(self.tokens))
        self.outcomes: list[tuple[int, bool]] = []

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def sure(self) -> int:
        return 0

    def guess(self, most: int) -> list[int]:
        size = len(self.tokens)
        right = next((list(r[size : size + most]) for r in self.known if list(r[:size]) == self.tokens), [0] * most)
        return [token if self.random.random() < 0.8 else 7 for token in right]


class Always(Speculation):
    """Guesses whether it pays or not."""

    def guess(self, guesser, most, sequences=1):  # type: ignore[no-untyped-def]
        return guesser.guess(min(most, self.most)) if most > 0 and guesser.sure() is not None else []


@pytest.fixture
def model(guessing_package: Path) -> OrtModel:
    return OrtModel(guessing_package, threads=1)


def test_answers_alone(model: OrtModel, guessing_package: Path) -> None:
    plain = still_export.load(guessing_package, threads=1, guess="none")
    told = [list[int]()]
    model.speculation = Always(4, lambda tokens, sequence: Told(told, tokens))
    guessing = LanguageModel(model, PrefixCache(model.table, 1 << 24))
    for case in CASES:
        for stop in ("", "zz"):
            options: dict[str, Any] = dict(
                max_tokens=case.tokens, temperature=case.sampling.temperature, seed=case.seed or 0
            )
            right = plain.generate(case.prompt, **options)
            if stop:  # in the midst of what was guessed
                options["stop"] = right.text[len(right.text) // 2 :][:2] or stop
                right = plain.generate(case.prompt, **options)
            told[0] = case.prompt + right.tokens
            found = guessing.generate(case.prompt, **options)
            assert (found.tokens, found.text, found.ended) == (right.tokens, right.text, right.ended)
            # What was kept is the state of what was said.
            again = case.prompt + right.tokens + IDS[:3]
            assert guessing.generate(again, max_tokens=5).tokens == plain.generate(again, max_tokens=5).tokens
            assert guessing._last is not None and guessing._last.cached_tokens > len(case.prompt)
    assert model.speculation.accepted > 50 and model.speculation.accepted < model.speculation.guesses
    assert found.to_dict()["speculation"]["steps"] == model.speculation.steps


def test_an_answer_that_is_given_up_leaves_its_own_tokens(model: OrtModel, guessing_package: Path) -> None:
    plain = still_export.load(guessing_package, threads=1, guess="none").generate(IDS[:9], max_tokens=30)
    told = [[*IDS[:9], *plain.tokens]]
    model.speculation = Always(4, lambda tokens, sequence: Told(told, tokens))
    for count in (1, 2, 5, 9):
        model.start()
        tokens = model.generate(IDS[:9], 30, Sampling())
        assert [next(tokens) for _ in range(count)] == plain.tokens[:count]
        del tokens
        assert model.length.tolist() == [9 + count - 1]
        assert [*model.generate(plain.tokens[count - 1 : count], 4, Sampling())] == plain.tokens[count : count + 4]


def test_the_distribution_is_that_of_plain_sampling(model: OrtModel) -> None:
    """Chi-square of the second token behind the likeliest first one, which a guess says right or wrong."""
    model.start()
    logits = model.prefill(IDS[:5]) / 0.7
    first = int(logits.argmax())
    logits = (model.step(np.array([first]))[0] / 0.7).astype(np.float64)
    exact = np.exp(logits - logits.max())
    exact /= exact.sum()
    likely = np.argsort(-exact)[:6]
    counts: Counter[int] = Counter()
    model.speculation = Always(
        4, lambda tokens, sequence: SimpleNamespace(guess=lambda most: [int(likely[1])] * most, extend=list, sure=int)
    )
    draws, tokens = 400, Sampling(0.7, seed=3)
    model.start()
    model.prefill(IDS[:5])
    kept = {name: array.copy() for name, array in model.take().items()}
    for _ in range(draws):
        model.put(0, kept, 5)
        counts[next(model._guessing(first, 4, tokens, model.speculation, []))] += 1
    bins = [(counts[t], draws * exact[t]) for t in likely] + [
        (draws - sum(counts[t] for t in likely), draws * (1 - exact[likely].sum()))
    ]
    chi = sum((seen - wanted) ** 2 / wanted for seen, wanted in bins if wanted > 5)
    assert chi < 22.5  # of 6 degrees of freedom: once in 1,000


def test_answers_beside_others(model: OrtModel, guessing_package: Path, byte_package: Path) -> None:
    text = Text(model)
    alone = answers(guessing_package, text)
    right = {case: alone(case) for case in CASES}
    told = [case.prompt + right[case][0] for case in CASES]
    for rows, guesser in (
        (3, None),
        (2, lambda tokens, sequence: Told(told, tokens)),
        (3, Draft(OrtModel(byte_package), 257).guesser),
    ):
        prefixes = None if guesser is None else PrefixCache(model.table, 1 << 24)
        model.speculation = Always(4, guesser or (lambda tokens, sequence: Told(told, tokens)))
        scheduler = Scheduler(model, text, rows, piece=16, prefixes=prefixes)
        for stop in (False, True):  # the second time what was kept is read
            cases = [replace(c, stop=right[c][1][5:7]) if stop and right[c][1][5:7] else c for c in CASES]
            clients = [Client(case) for case in cases]
            coming, round_ = list(clients), 0
            while coming or not scheduler.idle:
                for client in [c for c in coming if c.case.arrives <= round_]:
                    scheduler.submit(client.request)
                    coming.remove(client)
                scheduler.step()
                round_ += 1
            for client in clients:
                assert client.told == alone(client.case)
        assert model.speculation is not None
        assert 0 < model.speculation.accepted < model.speculation.guesses
    metrics = Metrics(scheduler).text().decode()
    assert (
        f"still_accepted_tokens {float(model.speculation.accepted)}" in metrics
        and "still_guesses_won_seconds" in metrics
    )


def test_a_draft_model(model: OrtModel, guessing_package: Path, byte_package: Path) -> None:
    plain = still_export.load(guessing_package, threads=1, guess="none")
    speculation = open_draft(model, OrtModel(byte_package, threads=1))
    model.speculation = Always(4, speculation.guesser)
    guessing = LanguageModel(model)
    for case in CASES:
        right = plain.generate(case.prompt, max_tokens=case.tokens)
        assert guessing.generate(case.prompt, max_tokens=case.tokens).tokens == right.tokens
    assert model.speculation.accepted > 0.95 * model.speculation.guesses  # the draft has the same weights
    with pytest.raises(RunError, match="accepts no guesses: export it with --speculate"):
        still_export.load(byte_package, guess=guessing_package)
    other = OrtModel(byte_package, threads=1)
    vocabulary = {"a": 1}
    with pytest.MonkeyPatch.context() as patch:
        whole = Text.__init__

        def small(self: Text, runner: OrtModel) -> None:
            whole(self, runner)
            if runner is other:
                self.tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary)  # type: ignore[assignment]

        patch.setattr(Text, "__init__", small)
        with pytest.raises(RunError, match=r"the draft .* has another tokenizer than"):
            open_draft(model, other)
