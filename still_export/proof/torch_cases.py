"""What verify asks: prompts around chunk boundaries, ragged batches, prompts in pieces, decode steps, with PyTorch's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from still_export.package.calls import Arrays, next_feed
from still_export.proof.cases import Case, distance, fixed_pair, row_errors, same_best
from still_export.proof.codes import as_numbers
from still_export.proof.layerwise import Call, Chain, Keep, LayerwiseModel, everything, nothing
from still_export.targets.registry import packaged_target
from still_graphs.states import StateTable
from still_kernels.registry import ties_of
from still_kernels.ties import Leads, Pairs

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 1000, 4097)
ROWS = 4
CHUNK = 64
"""Tokens at whose multiples calls end where no state grows by chunks: ops without such a state compute in chunks of so many."""


ROUNDED = 64
"""Tokens that PyTorch's own rounding is measured over at least: with fewer, further prompts of that length are drawn for it alone. The
errors of one token say little: of 192 first tokens of SmolLM2 the worst is 4 times as far off as the median one."""


class TorchCases:
    """Cases drawn at random and answered by PyTorch, all that are asked for at once.

    Args:
        manifest: Of the package.
        reference: The PyTorch model that answers, in a wider type than the package's.
        own: The same model as the package computes, whose errors that is held to.
        lengths: Prompt lengths, each prefilled at once; those beyond the capacity are left out.
        decode_steps: Single-token calls after a prefill; a quarter of them for several sequences: four, or all that an engine takes.
        seed: Of the prompts.
    """

    def __init__(
        self,
        manifest: dict[str, Any],
        reference: LayerwiseModel,
        own: LayerwiseModel,
        lengths: tuple[int, ...] = LENGTHS,
        decode_steps: int = 72,
        seed: int = 0,
    ) -> None:
        self.reference, self.own = reference, own
        self.ties = ties_of(manifest)
        self.random = np.random.default_rng(seed)
        self.vocabulary = int(manifest["model"]["vocab_size"])
        table = StateTable.of(manifest)
        self.chunk = table.period if table.period > 1 else CHUNK
        # An engine that takes more sequences may run other kernels for them, one that takes fewer takes those. Its own batch may
        # differ from the package's: `build --batch`.
        engine = next(iter(manifest.get("engines") or ()), manifest.get("trt", {"batch": ROWS}))
        self.sequences = int(engine["batch"])
        # An engine holds at least the rows of a chunk.
        runtime = packaged_target(manifest).runtime
        self.least_room = 3 * self.chunk if runtime is not None and runtime.engines else 0
        limit = table.capacity_tokens if table.bounded else 1 << 62
        self.lengths = tuple(n for n in lengths if n <= limit)
        self.longest = max(self.lengths, default=1)
        self.decode_prompt = min(2 * self.chunk + self.chunk // 2, max(1, limit - decode_steps))
        self.decode_steps = min(decode_steps, limit - self.decode_prompt)
        self._drafts = list(self._kinds())
        self.count = len(self._drafts)

    def draw(self, numbers: Sequence[int]) -> list[Case]:
        """The cases of these numbers with fresh prompts."""
        drafts = [self._drafts[number]() for number in numbers]
        chains = [[d.chain, *([d.scored] if d.scored else []), *([Chain.of(d.more)] if d.more else [])] for d in drafts]
        answers = iter(self.reference.run([chain for each in chains for chain in each]))
        answered = [[next(answers) for _ in each] for each in chains]
        cases = [self._case(draft, found) for draft, found in zip(drafts, answered, strict=True)]
        self._measure(drafts, cases, answered)
        return cases

    def _kinds(self) -> Iterator[Callable[[], _Draft]]:
        for length in self.lengths:
            yield partial(self._prefill, length)
        if self.sequences > 1:
            yield self._ragged
        yield self._pieces
        yield partial(self._decode, self.decode_steps, np.array([self.decode_prompt]))
        if self.sequences > 1:
            counts = np.resize([self.decode_prompt, 1, self.chunk, self.chunk + 1], self.sequences)
            yield partial(self._decode, -(-self.decode_steps // 4), np.minimum(counts, self.decode_prompt))

    def _tokens(self, *shape: int) -> np.ndarray:
        return self.random.integers(0, self.vocabulary, shape, dtype=np.int64)

    def _start(self, tokens: np.ndarray, capacity: int, new_tokens: np.ndarray | None = None) -> Arrays:
        room = max(capacity, self.least_room)
        return {**next_feed({}, tokens, new_tokens), **self.reference.empty_feed(tokens.shape[0], room)}

    def _prefill(self, length: int) -> _Draft:
        start = self._start(self._tokens(1, length), length)
        more = -(-ROUNDED // length) - 1
        others = self._start(self._tokens(more, length), length) if more else None
        scored = self._scored([start], everything)
        # The pieces that show how clearly was chosen are the prompt itself.
        return _Draft(f"prefill {length}", [start], scored or Chain.of(start), more=others, pieces=scored is not None)

    def _ragged(self) -> _Draft:
        """Sequences of different lengths in one call, one of them empty."""
        longest = min(3 * self.chunk + 1, self.longest)
        counts = np.resize(np.array([longest, 0, 1, min(longest, self.chunk + 1)], np.int64), self.sequences)
        start = self._start(self._tokens(self.sequences, longest), longest, counts)
        return _Draft(f"ragged batch of {self.sequences}", [start], Chain.of(start), self._scored([start]))

    def _pieces(self) -> _Draft:
        """Prefill in pieces across chunk boundaries; each call starts from PyTorch's state."""
        sizes = [self.chunk - 1, self.chunk + 1, 2 * self.chunk + 1]
        while sum(sizes) > self.longest and len(sizes) > 1:
            sizes.pop()
        first, *more = (self._tokens(1, max(1, min(size, self.longest))) for size in sizes)
        start = self._start(first, max(sum(sizes), 1))
        feeds = [start, *(next_feed({}, tokens) for tokens in more)]
        return _Draft("prefill in pieces", feeds, Chain(start, [*map(_call, feeds)]), self._scored(feeds))

    def _decode(self, steps: int, counts: np.ndarray) -> _Draft:
        prompt = self._tokens(len(counts), int(counts.max()))
        start = self._start(prompt, self.decode_prompt + steps, counts.astype(np.int64))
        tokens = tuple(self._tokens(len(counts), 1) for _ in range(steps))
        last = steps - 1
        places = [n for n in range(steps) if n == last or self.ties.chooses(start["new_tokens"] + n)]
        kept = {0, *places, *(place + 1 for place in places)}
        feeds = [start, *(next_feed({}, token) for token in tokens)]
        calls = [replace(_call(feed), keep=everything if i in kept else nothing) for i, feed in enumerate(feeds)]
        name = f"{steps} decode steps" + (f", {len(counts)} rows" if len(counts) > 1 else "")
        rows = {**start, "input_ids": _packed(prompt, counts, tokens), "new_tokens": counts + steps}
        return _Draft(name, feeds, Chain(start, calls), self._scored([rows]), steps=tokens, places=tuple(places))

    def _scored(self, feeds: Sequence[Arrays], last: Keep = nothing) -> Chain | None:
        """Calls whose scores tell how clearly PyTorch chose along the sequences that `feeds` bring, whose first call starts them; what the
        last of them keeps beside. None where nothing is chosen."""
        sequences = _sequences(feeds)
        plan = _Plan()
        self.ties.scores(plan, *sequences)
        if not plan.asked:
            return None
        calls = [replace(_call(feed), keep=self.ties.is_score) for feed in plan.asked]
        return Chain(
            feeds[0], [*calls[:-1], replace(calls[-1], keep=lambda name: last(name) or self.ties.is_score(name))]
        )

    def _case(self, draft: _Draft, found: list[list[Arrays]]) -> Case:
        """The case of a draft and the answers to its chains."""
        answers = self._whole(found[0]) if draft.pieces else found[0]
        if not draft.steps:
            feeds = [
                draft.feeds[0],
                *({**next_feed(a, f["input_ids"])} for a, f in zip(answers, draft.feeds[1:], strict=False)),
            ]
            return Case(draft.name, feeds, answers)
        feeds = [draft.feeds[0], *(next_feed(answers[place], draft.steps[place]) for place in draft.places)]
        expected = [answers[0], *(answers[place + 1] for place in draft.places)]
        along = np.concatenate([answer["logits"] for answer in answers[1:]], axis=1)
        return Case(draft.name, feeds, expected, {}, draft.steps, draft.places, along)

    def _whole(self, pieces: list[Arrays]) -> list[Arrays]:
        """The answer to a call that was cut into `pieces`."""
        logits = [answer["logits"] for answer in pieces]
        return [{**pieces[-1], "logits": np.concatenate(logits, axis=1) if self.reference.all_logits else logits[-1]}]

    def _measure(self, drafts: list[_Draft], cases: list[Case], answered: list[list[list[Arrays]]]) -> None:
        """Tell the cases the errors of PyTorch's own run on their calls, and on a draft's `more`, the last of `answered`; it carries its
        state as the target does. Where its choices differ by a tie, it counts with the reference's."""
        chains = [_own_chains(draft, case) for draft, case in zip(drafts, cases, strict=True)]
        answers = iter(self.own.run([chain for each in chains for chain in each]))
        for draft, case, asked, right in zip(drafts, cases, chains, answered, strict=True):
            found = [next(answers) for _ in asked]
            case.leads = self._leads(draft, right, found)
            if case.steps:
                pairs = _stepped_pairs(case, found[0])
            else:
                calls = self._whole(found[0]) if draft.pieces else [calls[0] for calls in found]
                pairs = [
                    fixed_pair(*each) for each in zip(case.feeds, case.expected, calls[: len(case.feeds)], strict=True)
                ]
            agree = np.concatenate([same_best(*pair) for pair in pairs])
            case.own_top1 = int(agree.sum()), agree.size
            pairs = self.ties.settle(pairs, case.leads)
            if draft.more:
                pairs.append(fixed_pair(draft.more, right[-1][0], found[-1][0]))
            case.own = [{name: row_errors(a[name], b[name]).astype(np.float32) for name in a} for a, b in pairs]
            errors = {name: [distance(a[name], b[name]).ravel() for a, b in pairs] for name in pairs[0][0]}
            case.own_mean = {n: float(np.concatenate(e).mean()) if any(map(len, e)) else 0.0 for n, e in errors.items()}

    def _leads(self, draft: _Draft, right: list[list[Arrays]], found: list[list[Arrays]]) -> Leads:
        """How clearly was chosen along a draft's sequences, of the reference's answers and of PyTorch's own."""
        if not (draft.pieces or draft.scored):
            return {}
        tokens, counts = _sequences(draft.feeds)
        of = 0 if draft.pieces else -1 - bool(draft.more)
        exact, own = (self.ties.scores(_Plan(answers[of]), tokens, counts) for answers in (right, found))
        return self.ties.leads(exact, own, counts)


@dataclass(frozen=True)
class _Draft:
    """A case that is not answered yet.

    Args:
        feeds: Tokens of its calls; the first with the states that they start from.
        chain: The calls.
        scored: Calls whose scores tell how clearly was chosen, where `chain` itself does not.
        more: A further call for PyTorch's own rounding alone.
        pieces: `chain` is one call cut into pieces whose scores tell that.
        steps, places: As of Case.
    """

    name: str
    feeds: list[Arrays]
    chain: Chain
    scored: Chain | None = None
    more: Arrays | None = None
    pieces: bool = False
    steps: tuple[np.ndarray, ...] = ()
    places: tuple[int, ...] = ()


class _Plan:
    """In the place of a model that is asked call by call: notes what is asked, and answers what is known."""

    def __init__(self, answers: Sequence[Arrays] = ()) -> None:
        self.asked: list[Arrays] = []
        self._answers = answers

    def empty_feed(self, batch: int, capacity: int) -> Arrays:
        return {}

    def infer(self, feed: Arrays) -> Arrays:
        self.asked.append(feed)
        return self._answers[len(self.asked) - 1] if self._answers else {}


def _call(feed: Arrays) -> Call:
    return Call(feed["input_ids"], feed["new_tokens"])


def _sequences(feeds: Sequence[Arrays]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, T] and their counts [B] of the sequences that `feeds` bring one after the other."""
    return np.concatenate([f["input_ids"] for f in feeds], axis=1), np.sum([f["new_tokens"] for f in feeds], axis=0)


def _own_chains(draft: _Draft, case: Case) -> list[Chain]:
    """The calls of `case` as a target makes them, each alone from PyTorch's state or steps that carry their own; those whose scores tell
    how clearly was chosen; and a draft's `more`."""
    others = [*([draft.scored] if draft.scored else []), *([Chain.of(draft.more)] if draft.more else [])]
    if draft.pieces:
        return [draft.chain, *others]
    if not case.steps:
        return [Chain.of(feed) for feed in case.feeds] + others
    calls = [replace(draft.chain.calls[0], right=as_numbers(case.expected[0])), *draft.chain.calls[1:]]
    for place, feed, expected in zip(case.places, case.feeds[1:], case.expected[1:], strict=True):
        calls[place + 1] = replace(calls[place + 1], right=as_numbers(expected), feed=feed)
    return [Chain(draft.chain.start, calls), *others]


def _stepped_pairs(case: Case, found: list[Arrays]) -> Pairs:
    """As of `Case.pairs`, of the answers to the one chain of a case with steps."""
    pairs, done = [fixed_pair(case.feeds[0], case.expected[0], found[0])], 0
    for place, feed, expected in zip(case.places, case.feeds[1:], case.expected[1:], strict=True):
        if place > done:
            logits = np.concatenate([outputs["logits"] for outputs in found[done + 1 : place + 1]], axis=1)
            pairs.append((case.before(place, done, feed), as_numbers({**found[place], "logits": logits})))
        pairs.append((as_numbers(expected), as_numbers(found[place + 1])))
        done = place + 1
    return pairs


def _packed(prompt: np.ndarray, counts: np.ndarray, steps: tuple[np.ndarray, ...]) -> np.ndarray:
    """Each sequence's prompt without its padding, then its steps, [B, T]."""
    packed = np.zeros((len(counts), prompt.shape[1] + len(steps)), np.int64)
    following = np.concatenate(steps, axis=1) if steps else np.zeros((len(counts), 0), np.int64)
    for sequence, count in enumerate(counts):
        packed[sequence, :count] = prompt[sequence, :count]
        packed[sequence, count : count + len(steps)] = following[sequence]
    return packed
