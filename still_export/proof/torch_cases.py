"""What verify asks: prompts around chunk boundaries, ragged batches, prompts in pieces, decode steps, with PyTorch's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from still_export.mixers.excuses import excuses_of
from still_export.mixers.ties import Leads
from still_export.package.calls import Arrays, next_feed
from still_export.proof.cases import Case, noise_of, same_best
from still_export.proof.sessions import Session
from still_export.runtime.torch import TorchModel
from still_graphs.states import StateTable

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 1000, 4097)
ROWS = 4
CHUNK = 64
"""Tokens at whose multiples calls end where no state grows by chunks: ops without such a state compute in chunks of so many."""


ROUNDED = 64
"""Tokens that PyTorch's own rounding is measured over at least: with fewer, further prompts of that length are drawn for it alone. The
errors of one token say little: of 192 first tokens of SmolLM2 the worst is 4 times as far off as the median one."""


class TorchCases:
    """Cases drawn at random and answered by PyTorch.

    Args:
        manifest: Of the package.
        model: The PyTorch model that answers: in the package's type, or in float32 beside `half`.
        half: The same model in half precision, whose errors a half precision package is held to.
        lengths: Prompt lengths, each prefilled at once; those beyond the capacity are left out.
        decode_steps: Single-token calls after a prefill; a quarter of them for several rows: four, or all that an engine takes.
        seed: Of the prompts.
    """

    def __init__(
        self,
        manifest: dict[str, Any],
        model: Any,
        half: Any = None,
        lengths: tuple[int, ...] = LENGTHS,
        decode_steps: int = 72,
        seed: int = 0,
    ) -> None:
        self.manifest = manifest
        self.reference = TorchModel(manifest, model)
        self.half = None if half is None else TorchModel(manifest, half)
        self.excuses = excuses_of(manifest)
        self.random = np.random.default_rng(seed)
        self.vocabulary = int(manifest["model"]["vocab_size"])
        table = StateTable.of(manifest)
        self.chunk = table.period if table.period > 1 else CHUNK
        # An engine that takes more rows may run other kernels for them, one that takes fewer takes those. Its own batch may
        # differ from the package's: `build --batch`.
        engine = next(iter(manifest.get("engines") or ()), manifest.get("trt", {"batch": ROWS}))
        self.rows = int(engine["batch"])
        # An engine holds at least the rows of a chunk.
        self.least_room = 3 * self.chunk if manifest["target"] == "trt" else 0
        limit = table.capacity_tokens if table.bounded else 1 << 62
        self.lengths = tuple(n for n in lengths if n <= limit)
        self.longest = max(self.lengths, default=1)
        self.decode_prompt = min(2 * self.chunk + self.chunk // 2, max(1, limit - decode_steps))
        self.decode_steps = min(decode_steps, limit - self.decode_prompt)
        self.count = len(self.lengths) + (4 if self.rows > 1 else 2)

    def __iter__(self) -> Iterator[Callable[[], Case]]:
        for length in self.lengths:
            yield partial(self._prefill, length)
        if self.rows > 1:
            yield self._ragged
        yield self._pieces
        yield partial(self._decode, self.decode_steps, np.array([self.decode_prompt]))
        if self.rows > 1:
            counts = np.resize([self.decode_prompt, 1, self.chunk, self.chunk + 1], self.rows)
            yield partial(self._decode, -(-self.decode_steps // 4), np.minimum(counts, self.decode_prompt))

    def _tokens(self, *shape: int) -> np.ndarray:
        return self.random.integers(0, self.vocabulary, shape, dtype=np.int64)

    def _start(self, tokens: np.ndarray, capacity: int, new_tokens: np.ndarray | None = None) -> Arrays:
        room = max(capacity, self.least_room)
        return {**next_feed({}, tokens, new_tokens), **self.reference.empty_feed(tokens.shape[0], room)}

    def _prefill(self, length: int) -> Case:
        case = self._fixed(f"prefill {length}", [self._start(self._tokens(1, length), length)])
        more = -(-ROUNDED // length) - 1
        return self._measured(case, [self._start(self._tokens(more, length), length)] if more and self.half else [])

    def _ragged(self) -> Case:
        """Rows of different lengths in one call, one of them empty."""
        longest = min(3 * self.chunk + 1, self.longest)
        counts = np.resize(np.array([longest, 0, 1, min(longest, self.chunk + 1)], np.int64), self.rows)
        tokens = self._tokens(self.rows, longest)
        return self._measured(self._fixed(f"ragged batch of {self.rows}", [self._start(tokens, longest, counts)]))

    def _pieces(self) -> Case:
        """Prefill in pieces across chunk boundaries; each call starts from PyTorch's state."""
        sizes = [self.chunk - 1, self.chunk + 1, 2 * self.chunk + 1]
        while sum(sizes) > self.longest and len(sizes) > 1:
            sizes.pop()
        first, *more = (self._tokens(1, max(1, min(size, self.longest))) for size in sizes)
        return self._measured(self._fixed("prefill in pieces", [self._start(first, max(sum(sizes), 1))], more))

    def _fixed(self, name: str, feeds: list[Arrays], more: list[np.ndarray] | None = None) -> Case:
        """A case of calls whose inputs are PyTorch's own: `feeds`, then `more` tokens from the state that they leave."""
        expected = [self.reference.infer(feed) for feed in feeds]
        for tokens in more or ():
            feeds.append(next_feed(expected[-1], tokens))
            expected.append(self.reference.infer(feeds[-1]))
        return Case(name, feeds, expected, partial(self._leads, feeds))

    def _decode(self, steps: int, counts: np.ndarray) -> Case:
        prompt = self._tokens(len(counts), int(counts.max()))
        start = self._start(prompt, self.decode_prompt + steps, counts.astype(np.int64))
        tokens = tuple(self._tokens(len(counts), 1) for _ in range(steps))
        outputs = self.reference.infer(start)
        feeds, expected = [start], [outputs]
        places: list[int] = []
        logits: list[np.ndarray] = []
        for number, token in enumerate(tokens):
            feed = next_feed(outputs, token)
            outputs = self.reference.infer(feed)
            logits.append(outputs["logits"])
            if number == steps - 1 or self.excuses.chooses(feed["past_length"]):
                places.append(number)
                feeds.append(feed)
                expected.append(outputs)
        name = f"{steps} decode steps" + (f", {len(counts)} rows" if len(counts) > 1 else "")
        rows = [{**start, "input_ids": _packed(prompt, counts, tokens), "new_tokens": counts + steps}]
        leads = partial(self._leads, rows)
        return self._measured(Case(name, feeds, expected, leads, tokens, tuple(places), np.concatenate(logits, axis=1)))

    def _leads(self, feeds: list[Arrays]) -> Leads:
        """Leads of the sequences that `feeds` bring; their first call starts them."""
        tokens = np.concatenate([f["input_ids"] for f in feeds], axis=1)
        return self.excuses.leads(self.reference, tokens, np.sum([f["new_tokens"] for f in feeds], axis=0))

    def _measured(self, case: Case, more: Iterable[Arrays] = ()) -> Case:
        """`case` with the errors of PyTorch's half precision run on its calls and on those of `more`; it carries its state as the target
        does."""
        if self.half is not None:
            session = Session(self.half)
            pairs, _ = case.pairs(session, self.excuses)
            for feed in more:
                pairs += Case("", [feed], [self.reference.infer(feed)], dict).pairs(session, self.excuses)[0]
            for name in pairs[0][0]:
                case.noise[name] = noise_of([(a[name], b[name]) for a, b in pairs])
            agree = np.concatenate([same_best(*pair) for pair in pairs])
            case.own_top1 = int(agree.sum()), agree.size
        return case


def _packed(prompt: np.ndarray, counts: np.ndarray, steps: tuple[np.ndarray, ...]) -> np.ndarray:
    """Each row's prompt without its padding, then its steps, [B, T]."""
    packed = np.zeros((len(counts), prompt.shape[1] + len(steps)), np.int64)
    following = np.concatenate(steps, axis=1) if steps else np.zeros((len(counts), 0), np.int64)
    for row, count in enumerate(counts):
        packed[row, :count] = prompt[row, :count]
        packed[row, count : count + len(steps)] = following[row]
    return packed
