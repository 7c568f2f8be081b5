"""PyTorch's answers to verify's questions: prompts around chunk boundaries, ragged batches, prompts in pieces, decode steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from still_export.package.calls import Arrays, image_inputs, next_feed
from still_export.proof.absolute import Overflow, overflow_of_logits
from still_export.proof.ahead import HeadCases
from still_export.proof.answers import EMPTY, Decisions, DecisionsByCase, Progress, Question, silent
from still_export.proof.cases import Case, errors_of, fixed_pair, row_errors, same_best
from still_export.proof.chains import Chain, ChainCall, nothing
from still_export.proof.codes import as_numbers
from still_export.proof.constants import ROUNDINGS
from still_export.proof.layerwise import MARGINS, LayerwiseModel
from still_export.proof.prompts import Draft, Prompts, Ranges
from still_export.proof.spill import SpillFile, joined
from still_export.proof.verdict import Check, Kind
from still_graphs.states import EMBEDDINGS
from still_kernels.registry import ties_of
from still_kernels.ties import CHOSEN, Look, Pairs, Scores, Ties

LENGTH = "present_length"
DRAWS = 3
"""Prompts of which one must have the same logits whole and in pieces."""


class TorchCases:
    """Random cases answered by PyTorch, all at once.

    Args:
        reference: The PyTorch model in a wider type than the package's.
        own: The same model in the package's type; its rounding errors set the package's bounds.

    Attributes:
        head: Cases of the package's MTP head, if any.
    """

    uses_decisions = True

    def __init__(
        self,
        manifest: dict[str, Any],
        reference: LayerwiseModel,
        own: LayerwiseModel,
        ranges: Ranges,
        words: Sequence[int] = (),
    ) -> None:
        self.reference, self.own = reference, own
        self.ties = ties_of(manifest)
        self.prompts = Prompts(manifest, reference.empty_feed, ranges, words)
        self.count = self.prompts.count
        self._layers: list[int] = []  # that route
        self.head: HeadCases | None = None
        self.progress: Progress = silent

    def begin(self, number: int) -> Question:
        return self.prompts.begin(number)

    def draw(self, numbers: Sequence[int], decisions: DecisionsByCase = EMPTY) -> list[Case]:
        """Like CaseSource. Cases run a second time if routers chose differently or selected keys are unsure; only the first run shows which
        layers route."""
        decisions = {number: decisions.get(number, Decisions()) for number in numbers}
        drafts = [self._with_choices(number, decisions[number]) for number in numbers]
        cases, unsure = self._answered(drafts)
        again = [
            place
            for place, (case, number) in enumerate(zip(cases, numbers, strict=True))
            if unsure[place]
            or (decisions[number].seen and case.experts and not case.same_experts(decisions[number].seen))
        ]
        if again:
            drafts = [self._with_choices(numbers[place], decisions[numbers[place]]) for place in again]
            meanings = _Meanings(self.own, drafts, self.ties) if any(unsure) else None
            for place, case in zip(again, self._answered(drafts, meanings)[0], strict=True):
                cases[place] = case
        return cases

    def draw_disturbed(self, numbers: Sequence[int], decisions: DecisionsByCase, seed: int) -> list[Case]:
        """Like `draw`; the own run's embeddings are not quite the model's (`LayerwiseModel.disturbed`)."""
        self.own.disturbed = torch.Generator().manual_seed(seed)
        try:
            return self.draw(numbers, decisions)
        finally:
            self.own.disturbed = None

    def causality(self) -> Check:
        """Whether a later token changes an earlier answer of the reference: a prompt whole and in two pieces."""
        # Of two equal keys, calls of different sizes may select different ones; a reference that looks ahead fails with all tokens.
        for draw in range(DRAWS):
            found = self._in_pieces(draw)
            if found.passed:
                break
        return found

    def _in_pieces(self, draw: int) -> Check:
        sizes = np.minimum([self.prompts.chunk + 1, self.prompts.chunk + 2], max(1, self.prompts.longest // 2))
        random = np.random.default_rng([self.prompts.ranges.seed, 3, draw])
        tokens = random.integers(0, self.prompts.vocabulary, (1, int(sizes.sum())))
        start = {**next_feed({}, tokens), **self.reference.empty_feed(*tokens.shape)}
        pieces = (tokens, tokens[:, : sizes[0]], tokens[:, sizes[0] :])
        one, *two = (ChainCall(part, np.array([part.shape[1]]), nothing, every=True) for part in pieces)
        (whole,), parts = self.reference.run([Chain(start, [one]), Chain(start, two)])
        off = np.abs(np.concatenate([part["logits"] for part in parts], axis=1) - whole["logits"]).max(-1)[0]
        bound = ROUNDINGS * float(np.finfo(np.float32).eps) / 2 * float(np.abs(whole["logits"]).max())
        name = "no later token changes an earlier answer of PyTorch"
        what = "logits of a prompt whole and in pieces differ, in PyTorch alone" * (not off.max() <= bound)
        return Check(
            name,
            not what,
            what,
            f"token {int(off.argmax())} of {off.size}",
            float(off.max()),
            bound,
            kind=Kind.REFERENCE,
        )

    def _answered(self, drafts: Sequence[Draft], meanings: _Meanings | None = None) -> tuple[list[Case], list[bool]]:
        """Returns (cases, unsure). unsure[i]: a selected key could belong to more than one token."""
        reference = _RunningChains(self.reference, [[d.chain, *d.further] for d in drafts], self.ties)
        cases = [_case(draft, found[0].outputs) for draft, found in zip(drafts, reference.answers(), strict=True)]
        choices_of: list[list[dict[int, np.ndarray]]] = [[{}, *({} for _ in d.further)] for d in drafts]
        # Both runs go layer by layer, side by side: what a layer gave is measured, then dropped.
        own = _RunningChains(self.own, list(map(_own_chains, drafts, choices_of)), self.ties)
        spills = [SpillFile() for _ in cases]
        count = self.reference.layers
        for layer in [*range(count), None]:
            self.progress("PyTorch's layers", count if layer is None else layer, count)
            if layer is not None and meanings is not None:
                meanings.resolve(layer)
            right = reference.answers(layer)
            scores_of = [
                [self.ties.scores(each.looks) if layer is not None else {} for each in chains] for chains in right
            ]
            exact = [scores[0] for scores in scores_of]
            for draft, case, choices, answered, scores in zip(drafts, cases, choices_of, right, scores_of, strict=True):
                case.add(_case(draft, answered[0].outputs))
                case.experts |= {~key: x[..., -1, :] > 0 for key, x in scores[0].items() if key < 0}
                for chosen, found in zip(choices, scores, strict=True):  # the own run's errors are rounding alone
                    chosen |= {key: _places(x[..., -1, :] > 0) for key, x in found.items()}
            for each in zip(drafts, cases, right, exact, own.answers(layer), strict=True):
                self._measure(layer, *each)
            for case, spill in zip(cases, spills, strict=True):
                spill.take([*case.feeds, *case.expected], f".{layer}")
        for spill in spills:
            spill.restore()
        for of, name in ((own, "overflow"), (reference, "right_overflow")):
            left = iter(of.passage.overflows)
            for case, chains_of in zip(cases, of.by_case, strict=True):
                layers = [layer for layer in [next(left) for _ in chains_of] if layer is not None]
                if layers:
                    setattr(case, name, Overflow(min(layers)))
        self._layers = sorted(cases[0].experts)
        chains = iter(reference.passage.unsure)
        return cases, [any([next(chains) for _ in (d.chain, *d.further)]) for d in drafts]

    def _with_choices(self, number: int, decisions: Decisions) -> Draft:
        """The draft of a case with the choices of a runtime."""
        draft = self.prompts.drawn.get(number) or self.prompts.draft(number)
        seen = {~layer: experts for layer, experts in zip(self._layers, decisions.seen, strict=False)}
        return replace(draft, chain=replace(draft.chain, choices=seen | dict(decisions.selected)))

    def _measure(
        self,
        layer: int | None,
        draft: Draft,
        case: Case,
        right: list[_Answered],
        scores: Scores,
        own: list[_Answered],
    ) -> None:
        """Add the errors of the own run to a case, for a layer or the logits: of its calls, and of a draft's `further`."""
        answers, further = own[: len(own) - len(draft.further)], own[len(own) - len(draft.further) :]
        if scores:
            counts = np.sum([feed["new_tokens"] for feed in draft.feeds], axis=0)
            own_scores = self.ties.scores([look for answer in answers for look in answer.looks])
            case.leads |= self.ties.leads(scores, own_scores, counts)
        pairs = _pairs(case, answers[0].outputs, layer)
        if layer is None:
            agree = np.concatenate([same_best(*pair) for pair in pairs])
            case.own_top1 = int(agree.sum()), agree.size
            own_logits, right_logits = ([each[side]["logits"] for each in pairs] for side in (1, 0))
            case.overflow, case.right_overflow = overflow_of_logits(own_logits), overflow_of_logits(right_logits)
        case.own = case.own or [{} for _ in range(len(pairs) + len(further))]
        for name in pairs[0][0]:
            rows, sums = zip(*(errors_of(a[name], b[name]) for a, b in pairs), strict=True)
            case.own_mean[name] = sum(sums) / max(sum(a[name].size for a, _ in pairs), 1)
            for by_name, errors in zip(case.own, rows, strict=False):
                by_name[name] = errors.astype(np.float32)
        for by_name, chain, a, b in zip(case.own[len(pairs) :], draft.further, right[1:], further, strict=True):
            expected, actual = _pair(chain.start, a.outputs[0], b.outputs[0], layer)
            by_name.update({n: row_errors(x, actual[n]).astype(np.float32) for n, x in expected.items()})


class _RunningChains:
    """Chains of several cases that run through a model layer by layer, in calls cut so that every score is recorded."""

    def __init__(self, model: LayerwiseModel, by_case: list[list[Chain]], ties: Ties) -> None:
        self.ties, self.by_case, self.chains = ties, by_case, [chain for each in by_case for chain in each]
        self.cut = [
            [_cut(replace(call, every=call.every or model.all_logits), ties) for call in chain.calls]
            for chain in self.chains
        ]
        whole = zip(self.chains, self.cut, strict=True)
        self.passage = model.begin([replace(chain, calls=[*itertools.chain(*calls)]) for chain, calls in whole])

    def answers(self, layer: int | None = -1) -> list[list[_Answered]]:
        """Answers of the next layer (-1: before the first, lengths only; None: after the last). They are not stored."""
        if layer is None:
            self.passage.answer()
        elif layer >= 0:
            self.passage.through(layer)
        found = []
        for outputs in self.passage.outputs:
            found.append([{LENGTH: call[LENGTH], **_of(call, layer)} for call in outputs])
            for call in outputs:
                for name in _of(call, layer).keys() - {LENGTH}:
                    del call[name]
        answers = map(_answered, self.chains, self.cut, found)
        return [[next(answers) for _ in each] for each in self.by_case]


class _Meanings:
    """Resolves selected keys to tokens by PyTorch's own run."""

    # Not by the reference: in half precision, a token with huge activations has keys as far from the reference's as another token's, but
    # alike in both half-precision runs.

    def __init__(self, own: LayerwiseModel, drafts: Sequence[Draft], ties: Ties) -> None:
        self.chains = [draft.chain for draft in drafts]
        copies = [replace(chain, calls=_joined(chain.calls), choices=dict(chain.choices)) for chain in self.chains]
        self.running = _RunningChains(own, [[chain] for chain in copies], ties)

    def resolve(self, layer: int) -> None:
        """Replace keys by offsets of tokens in the chains' choices for a layer."""
        for chain, (answered,) in zip(self.chains, self.running.answers(layer), strict=True):
            keys, found = chain.choices.get(layer), self.running.ties.scores(answered.looks)
            if keys is not None and keys.dtype.kind == "f" and layer in found:
                places = _places(found[layer][..., -1, :] > 0)
                few = places.shape[3]
                chunks = min(places.shape[2], keys.shape[2] // few) if few else 0
                known = (np.isfinite(keys).all(-1) & keys.any(-1))[:, :, : chunks * few]
                reported = known.reshape(*known.shape[:2], chunks, few).all(-1, keepdims=True)
                chain.choices[layer] = np.where(reported, places[:, :, :chunks], -1)


@dataclass(frozen=True)
class _Answered:
    """Outputs of a chain's calls, and its scores."""

    outputs: list[Arrays]
    looks: list[Look]


def _joined(calls: Sequence[ChainCall]) -> list[ChainCall]:
    """The same tokens in fewer calls, which keep no outputs."""
    found: list[ChainCall] = []
    for call in calls:
        last, call = found[-1:], replace(call, keep=nothing)
        if last and all((c.new_tokens == c.tokens.shape[1]).all() and not c.images for c in (*last, call)):
            tokens = np.concatenate([last[0].tokens, call.tokens], axis=1)
            call = ChainCall(tokens, last[0].new_tokens + call.new_tokens, nothing)
            found.pop()
        found.append(call)
    return found


def _cut(call: ChainCall, ties: Ties) -> list[ChainCall]:
    """`call` as calls of at most `ties.span` new tokens per sequence; all keep the scores."""
    size = ties.span or call.tokens.shape[1]
    calls = []
    for start in range(0, call.tokens.shape[1], size):
        tokens = call.tokens[:, start : start + size]
        images = {
            name: np.ascontiguousarray(
                x[:, start : start + size] if name == EMBEDDINGS else x[..., start : start + size]
            )
            for name, x in call.images.items()
        }
        new = np.clip(call.new_tokens - start, 0, tokens.shape[1])
        calls.append(replace(call, tokens=tokens, new_tokens=new, images=images))
    parts = [replace(part, keep=ties.is_score) for part in calls[:-1]]
    return [*parts, replace(calls[-1], keep=lambda name: call.keep(name) or ties.is_score(name))]


def _answered(chain: Chain, cut: list[list[ChainCall]], found: list[Arrays]) -> _Answered:
    """The answers to `chain`, from those to its calls in pieces."""
    past, left = chain.start["past_length"], iter(found)
    answered = _Answered([], [])
    for calls in cut:
        pieces = [next(left) for _ in calls]
        for piece in pieces:
            answered.looks.append((past, piece))
            past = piece[LENGTH]
        outputs = {
            n: x for n, x in pieces[-1].items() if not n.startswith((f"present_{MARGINS}.", f"present_{CHOSEN}."))
        }
        if len(pieces) > 1 and "logits" in outputs:
            logits = [piece["logits"] for piece in pieces]
            if not calls[-1].every:  # of each sequence's last token
                for i, call in enumerate(calls[1:], 1):
                    logits[i] = np.where((call.new_tokens > 0)[:, None, None], logits[i], logits[i - 1])
            outputs["logits"] = joined(logits, axis=1) if calls[-1].every else logits[-1]
        answered.outputs.append(outputs)
    return answered


def _case(draft: Draft, answers: list[Arrays]) -> Case:
    """The case of a draft, from the answers to its chain."""
    if not draft.steps:
        fed = zip(answers, draft.feeds[1:], strict=False)
        following = ({**next_feed(a, f["input_ids"]), **image_inputs(f)} for a, f in fed)
        return Case(draft.name, [draft.feeds[0], *following], answers)
    lengths = [int(answer["present_length"][0] - answers[0]["present_length"][0]) for answer in answers]
    after = dict(zip(lengths, answers, strict=True))  # by number of steps
    feeds = [draft.feeds[0], *(next_feed(after[place], draft.steps[place]) for place in draft.places)]
    expected = [after[0], *(after[place + 1] for place in draft.places)]
    logits = [answer["logits"] for answer in answers[1:] if "logits" in answer]
    along = joined(logits, axis=1) if logits else None
    return Case(draft.name, feeds, expected, {}, draft.steps, draft.places, along)


def _own_chains(draft: Draft, choices: Sequence[dict[int, np.ndarray]]) -> list[Chain]:
    """Chains of the own run: the reference's, with its choices so far."""
    return [
        replace(chain, choices=chosen) for chain, chosen in zip((draft.chain, *draft.further), choices, strict=True)
    ]


def _places(mask: np.ndarray) -> np.ndarray:
    """Chosen experts of a mask [.., E], as in `Chain.choices`, padded with -1."""
    count = mask.sum(-1)
    found = np.argsort(~mask, axis=-1, kind="stable")[..., : int(count.max(initial=0))]
    return np.where(np.arange(found.shape[-1]) < count[..., None], found, -1)


def _of(outputs: Arrays, layer: int | None) -> Arrays:
    """Outputs of a layer; None: those of no layer."""
    end = f".{layer}"
    return {n: x for n, x in outputs.items() if (n.endswith(end) if layer is not None else "." not in n)}


def _pair(feed: Arrays, expected: Arrays, actual: Arrays, layer: int | None) -> tuple[Arrays, Arrays]:
    """Outputs of a layer (`_of`) of both sides, with padding set to zero."""
    a, b = _of(expected, layer), _of(actual, layer)
    return fixed_pair(feed, a, b) if layer is None else (as_numbers(a), as_numbers(b))


def _pairs(case: Case, found: list[Arrays], layer: int | None) -> Pairs:
    """`Case.pairs` for a layer (`_of`), from the answers to a case's calls, or to the one chain of its steps."""
    if not case.steps:
        calls = zip(case.feeds, case.expected, found, strict=True)
        return [_pair(*call, layer) for call in calls]
    pairs, done, pieces = [_pair(case.feeds[0], case.expected[0], found[0], layer)], 0, iter(found[1:])
    for place, feed, expected in zip(case.places, case.feeds[1:], case.expected[1:], strict=True):
        if place > done:
            pairs.append((_of(case.before(place, done, feed), layer), as_numbers(_of(next(pieces), layer))))
        pairs.append((as_numbers(_of(expected, layer)), as_numbers(_of(next(pieces), layer))))
        done = place + 1
    return pairs
