"""Random prompts for a proof, without torch: around chunk boundaries, ragged batches, prompts in pieces, decode steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from still_export.package.calls import Arrays, image_inputs, next_feed
from still_export.proof.answers import Question
from still_export.proof.chains import Chain, ChainCall
from still_export.runtime.images import image_positions
from still_export.targets.registry import packaged_target
from still_graphs.states import EMBEDDINGS, POSITIONS, StateTable
from still_kernels.registry import ties_of

CHUNK = 64
"""Chunk size where no state grows by chunks: such ops compute in chunks of this size."""
WORK = {"cpu": 4e11, "cuda": 4e13}
"""Parameters times tokens of a proof's prompts, by PyTorch's device: half a minute of float64 on two cores."""
LEAST_TOKENS, MOST_TOKENS = 600, 16_384
"""Tokens of a proof's prompts, at least and at most."""
STEPS, LATE = 72, 8
"""Single tokens after a prompt of some chunks, and at the end of the longest sequence."""
ROWS = (2, 5)
"""Sequences in one call, besides one."""
RUN = 16
"""Tokens of a text, or random tokens, in a row."""
ROUNDED = 64
"""Least tokens over which PyTorch's own rounding is measured; for shorter prompts, more prompts of that length are drawn for it alone. One
token's error says little: among 192 first tokens of SmolLM2 the worst errs 4 times as much as the median."""


@dataclass(frozen=True)
class Ranges:
    """What is asked: prompt lengths, steps after a prompt, sequences in one call, and the tokens of the longest sequence.

    Args:
        lengths: Each prefilled at once.
        steps: Single-token calls; a quarter of them with several sequences.
        end: Tokens after the last steps; 0: no steps there.
        seed: Of lengths and tokens.
    """

    lengths: tuple[int, ...]
    steps: int = STEPS
    rows: tuple[int, ...] = ROWS
    end: int = 0
    seed: int = 0

    @classmethod
    def of(cls, manifest: dict[str, Any], seed: int, device: str = "cpu", share: float = 1.0) -> Ranges:
        """Lengths around a chunk and one of each octave up to the capacity, as far as `share` of the time allows.

        Args:
            device: Of PyTorch.
        """
        table, random = StateTable.of(manifest), np.random.default_rng([seed, 1])
        chunk = table.period if table.period > 1 else CHUNK
        limit = table.capacity_tokens if table.bounded else 1 << 62
        tokens = WORK[device] / max(1, manifest["model"].get("parameters", 1))
        budget = int(share * min(max(tokens, LEAST_TOKENS), MOST_TOKENS))
        lengths = {n for n in (1, chunk - 1, chunk, chunk + 1, 2 * chunk + 1) if 1 <= n <= limit and n <= budget // 4}
        left, octave = budget // 2 - sum(lengths), 2
        while octave <= limit:
            drawn = int(random.integers(octave, min(2 * octave, limit + 1)))
            if drawn > left:
                break
            lengths, left, octave = lengths | {drawn}, left - drawn, 2 * octave
        if 2 * limit - 1 <= left:
            lengths |= {limit - 1, limit} - {0}
        end = limit if limit <= budget // 4 else max(lengths) + LATE
        return cls(tuple(sorted(lengths)), STEPS, ROWS, min(end, limit), seed)

    @property
    def longest(self) -> int:
        return max((*self.lengths, self.end), default=1)

    def asked(self) -> str:
        """In words."""
        lengths, rows = (", ".join(map(str, x)) for x in (self.lengths, (1, *self.rows)))
        late = f"; steps up to token {self.end}" if self.end else ""
        return f"seed {self.seed}: prompts of {lengths} tokens; {self.steps} steps{late}; {rows} rows"

    def not_asked(self, manifest: dict[str, Any]) -> list[str]:
        """The promised ranges that were left out, one line each."""
        table = StateTable.of(manifest)
        found = [f"more than {max((1, *self.rows))} sequences in one call"]
        if not table.bounded:
            found.append(f"tokens behind number {self.longest:,}; the package promises any number")
        elif self.longest < table.capacity_tokens:
            found.append(f"tokens behind number {self.longest:,}; the package promises {table.capacity_tokens:,}")
        return found


@dataclass(frozen=True)
class Draft:
    """A case without answers.

    Args:
        feeds: Tokens of its calls; the first with the states that they start from.
        further: One call at most, for PyTorch's own rounding alone.
        steps, places: See Case.
    """

    name: str
    feeds: list[Arrays]
    chain: Chain
    further: tuple[Chain, ...] = ()
    steps: tuple[np.ndarray, ...] = ()
    places: tuple[int, ...] = ()


class Prompts:
    """Random prompts for a package.

    Args:
        empty_feed: (sequences, capacity) -> the states of empty sequences.
        ranges: What is asked; lengths beyond the capacity are left out.
        words: Tokens of texts, chats and special ones; every other run of RUN tokens consists of these.
    """

    def __init__(
        self,
        manifest: dict[str, Any],
        empty_feed: Callable[[int, int], Arrays],
        ranges: Ranges,
        words: Sequence[int] = (),
    ) -> None:
        self.empty_feed, self.ranges = empty_feed, ranges
        self.words, self._drawn = [*map(int, words)], 0
        self.ties = ties_of(manifest)
        self.random = np.random.default_rng(ranges.seed)
        self.vocabulary = int(manifest["model"]["vocab_size"])
        self.sees, self.channels = bool(manifest.get("vision")), manifest["model"].get("hidden_size", 0)
        table = StateTable.of(manifest)
        self.chunk = table.period if table.period > 1 else CHUNK
        # An engine has a batch of its own, and room for at least the rows of a chunk.
        target = packaged_target(manifest)
        engine = target.built and bool(target.runtime)
        most = int(next(iter(manifest.get("engines") or ()), manifest.get("trt", {"batch": 1 << 30}))["batch"])
        self.rows = sorted(
            {min(rows, most) for rows in ranges.rows} - {1} | ({most} if engine and 1 < most < 1 << 30 else set())
        )
        self.least_room = 3 * self.chunk if engine else 0
        limit = table.capacity_tokens if table.bounded else 1 << 62
        self.lengths = tuple(n for n in ranges.lengths if n <= limit)
        self.longest = max(self.lengths, default=1)
        self.decode_prompt = min(2 * self.chunk + self.chunk // 2, max(1, limit - ranges.steps))
        self.decode_steps = min(ranges.steps, limit - self.decode_prompt)
        self.end = min(ranges.end, limit)
        self._drafts = list(self._kinds())
        self.count = len(self._drafts)
        self.drawn: dict[int, Draft] = {}

    def draft(self, number: int) -> Draft:
        """Draw a case with a fresh prompt, stored in `drawn`."""
        self.drawn[number] = self._drafts[number]()
        return self.drawn[number]

    def begin(self, number: int) -> Question:
        draft = self.draft(number)
        return Question(draft.feeds[:1] if draft.steps else draft.feeds, draft.steps, draft.places)

    def _kinds(self) -> Iterator[Callable[[], Draft]]:
        for length in self.lengths:
            yield partial(self._prefill, length)
        for rows in self.rows[-1:]:
            yield partial(self._ragged, rows)
        yield self._pieces
        if self.sees:
            yield self._images
        yield partial(self._decode, self.decode_steps, np.array([self.decode_prompt]))
        for rows in self.rows:
            counts = np.resize([self.decode_prompt, 1, self.chunk, self.chunk + 1], rows)
            yield partial(self._decode, -(-self.decode_steps // 4), np.minimum(counts, self.decode_prompt))
        if self.end > LATE:
            yield partial(self._decode, LATE, np.array([self.end - LATE]))

    def _tokens(self, *shape: int) -> np.ndarray:
        drawn = self.random.integers(0, self.vocabulary, shape, dtype=np.int64)
        if not self.words:
            return drawn
        places = self._drawn + np.arange(drawn.size)
        self._drawn += drawn.size
        runs, within = np.divmod(places, RUN)
        words = np.array(self.words, np.int64)[(runs // 2 * RUN + within) % len(self.words)]
        return np.where(runs % 2, words, drawn.reshape(-1)).reshape(shape)

    def _start(self, tokens: np.ndarray, capacity: int, new_tokens: np.ndarray | None = None) -> Arrays:
        room = max(capacity, self.least_room)
        return {**next_feed({}, tokens, new_tokens), **self.empty_feed(tokens.shape[0], room)}

    def _prefill(self, length: int) -> Draft:
        start = self._start(self._tokens(1, length), length)
        more = -(-ROUNDED // length) - 1
        further = (Chain.of(self._start(self._tokens(more, length), length)),) if more else ()
        return Draft(f"prefill {length}", [start], Chain.of(start), further)

    def _ragged(self, rows: int) -> Draft:
        """Sequences of different lengths in one call, one of them empty."""
        longest = min(3 * self.chunk + 1, self.longest)
        counts = np.resize(np.array([longest, 0, 1, min(longest, self.chunk + 1)], np.int64), rows)
        start = self._start(self._tokens(rows, longest), longest, counts)
        return Draft(f"ragged batch of {rows}", [start], Chain.of(start))

    def _pieces(self) -> Draft:
        """Prefill in pieces across chunk boundaries; each call starts from PyTorch's state."""
        sizes = [self.chunk - 1, self.chunk + 1, 2 * self.chunk + 1]
        while sum(sizes) > self.longest and len(sizes) > 1:
            sizes.pop()
        first, *more = (self._tokens(1, max(1, min(size, self.longest))) for size in sizes)
        start = self._start(first, max(sum(sizes), 1))
        feeds = [start, *(next_feed({}, tokens) for tokens in more)]
        return Draft("prefill in pieces", feeds, Chain(start, [*map(_call, feeds)]))

    def _images(self) -> Draft:
        """Prompts with images in pieces, and two tokens after them; positions come from the images."""
        text, grids = self.random.integers(1, 9, 3), [(1, *self.random.integers(2, 7, 2)) for _ in range(2)]
        seen = np.repeat(
            [False, True, False, True, False], [text[0], np.prod(grids[0]), text[1], np.prod(grids[1]), text[2]]
        )
        ids = np.where(seen, -1, self._tokens(1, len(seen)))
        images = {
            EMBEDDINGS: self.random.standard_normal((1, len(seen), self.channels), np.float32),
            POSITIONS: image_positions(seen, grids, 1)[:, None],
        }
        ends = [text[0] + np.prod(grids[0]) // 2 + 1, len(seen) - 2, len(seen) - 1, len(seen)]
        feeds = []
        for begin, end in pairwise([0, *map(int, ends)]):
            part = {EMBEDDINGS: images[EMBEDDINGS][:, begin:end], POSITIONS: images[POSITIONS][..., begin:end]}
            call = {name: np.ascontiguousarray(x) for name, x in part.items()}
            feeds.append({**next_feed({}, ids[:, begin:end]), **call})
        feeds[0] = {**self._start(feeds[0]["input_ids"], len(seen)), **image_inputs(feeds[0])}
        return Draft("prompt with images, in pieces", feeds, Chain(feeds[0], [*map(_call, feeds)]))

    def _decode(self, steps: int, counts: np.ndarray) -> Draft:
        prompt = self._tokens(len(counts), int(counts.max()))
        start = self._start(prompt, int(counts.max()) + steps, counts.astype(np.int64))
        tokens = tuple(self._tokens(len(counts), 1) for _ in range(steps))
        places = [n for n in range(steps) if n == steps - 1 or self.ties.chooses(start["new_tokens"] + n)]
        name = f"{steps} steps after {int(counts.max())}" + (f", {len(counts)} rows" if len(counts) > 1 else "")
        feeds = [start, *(next_feed({}, token) for token in tokens)]
        # Steps also define a prompt in pieces: those between two compared states become one call.
        cuts = sorted({0, *places, *(place + 1 for place in places)})
        pieces = [next_feed({}, np.concatenate(tokens[a:b], axis=1)) for a, b in pairwise(cuts)]
        chain = Chain(start, [_call(start), *(replace(_call(piece), every=True) for piece in pieces)])
        return Draft(name, feeds, chain, steps=tokens, places=tuple(places))


def _call(feed: Arrays) -> ChainCall:
    return ChainCall(feed["input_ids"], feed["new_tokens"], images=image_inputs(feed))
