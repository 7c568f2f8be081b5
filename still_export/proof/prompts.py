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

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 1000, 4097)
CPU_WORK = 5e12
"""Limit of parameters times prompt tokens for default lengths on a CPU: 10 to 20 minutes on two cores."""
ROWS = 4
CHUNK = 64
"""Chunk size where no state grows by chunks: such ops compute in chunks of this size."""

RUN = 16
"""Tokens of a text, or random tokens, in a row."""

ROUNDED = 64
"""Least tokens over which PyTorch's own rounding is measured; for shorter prompts, more prompts of that length are drawn for it alone. One
token's error says little: among 192 first tokens of SmolLM2 the worst errs 4 times as much as the median."""


def affordable(parameters: int, device: str) -> tuple[int, ...]:
    """Default lengths for a model of this size, at least the first. On a CPU the longest are left out: 4,097 tokens from 0.9e9 parameters,
    1,000 from 3e9."""
    lengths: tuple[int, ...] = LENGTHS
    while device == "cpu" and len(lengths) > 1 and parameters * sum(lengths) > CPU_WORK:
        lengths = lengths[:-1]
    return lengths


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
        lengths: Prompt lengths, each prefilled at once; those beyond the capacity are left out.
        decode_steps: Single-token calls after a prefill; a quarter of them with several sequences: four, or an engine's batch.
        seed: Seed of the prompts, which are drawn in the order of their use.
        words: Tokens of texts, chats and special ones; every other run of RUN tokens consists of these.
    """

    def __init__(
        self,
        manifest: dict[str, Any],
        empty_feed: Callable[[int, int], Arrays],
        lengths: tuple[int, ...] = LENGTHS,
        decode_steps: int = 72,
        seed: int = 0,
        words: Sequence[int] = (),
    ) -> None:
        self.empty_feed, self.seed = empty_feed, seed
        self.words, self._drawn = [*map(int, words)], 0
        self.ties = ties_of(manifest)
        self.random = np.random.default_rng(seed)
        self.vocabulary = int(manifest["model"]["vocab_size"])
        self.sees, self.channels = bool(manifest.get("vision")), manifest["model"].get("hidden_size", 0)
        table = StateTable.of(manifest)
        self.chunk = table.period if table.period > 1 else CHUNK
        # An engine for more sequences may run other kernels for them; one for fewer runs those. Its batch may
        # differ from the package's: `build --batch`.
        engine = next(iter(manifest.get("engines") or ()), manifest.get("trt", {"batch": ROWS}))
        self.sequences = int(engine["batch"])
        # An engine has room for at least the rows of a chunk.
        target = packaged_target(manifest)
        self.least_room = 3 * self.chunk if target.built and target.runtime else 0
        limit = table.capacity_tokens if table.bounded else 1 << 62
        self.lengths = tuple(n for n in lengths if n <= limit)
        self.longest = max(self.lengths, default=1)
        self.decode_prompt = min(2 * self.chunk + self.chunk // 2, max(1, limit - decode_steps))
        self.decode_steps = min(decode_steps, limit - self.decode_prompt)
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
        if self.sequences > 1:
            yield self._ragged
        yield self._pieces
        if self.sees:
            yield self._images
        yield partial(self._decode, self.decode_steps, np.array([self.decode_prompt]))
        if self.sequences > 1:
            counts = np.resize([self.decode_prompt, 1, self.chunk, self.chunk + 1], self.sequences)
            yield partial(self._decode, -(-self.decode_steps // 4), np.minimum(counts, self.decode_prompt))

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

    def _ragged(self) -> Draft:
        """Sequences of different lengths in one call, one of them empty."""
        longest = min(3 * self.chunk + 1, self.longest)
        counts = np.resize(np.array([longest, 0, 1, min(longest, self.chunk + 1)], np.int64), self.sequences)
        start = self._start(self._tokens(self.sequences, longest), longest, counts)
        return Draft(f"ragged batch of {self.sequences}", [start], Chain.of(start))

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
        start = self._start(prompt, self.decode_prompt + steps, counts.astype(np.int64))
        tokens = tuple(self._tokens(len(counts), 1) for _ in range(steps))
        places = [n for n in range(steps) if n == steps - 1 or self.ties.chooses(start["new_tokens"] + n)]
        name = f"{steps} decode steps" + (f", {len(counts)} rows" if len(counts) > 1 else "")
        feeds = [start, *(next_feed({}, token) for token in tokens)]
        # Steps also define a prompt in pieces: those between two compared states become one call.
        cuts = sorted({0, *places, *(place + 1 for place in places)})
        pieces = [next_feed({}, np.concatenate(tokens[a:b], axis=1)) for a, b in pairwise(cuts)]
        chain = Chain(start, [_call(start), *(replace(_call(piece), every=True) for piece in pieces)])
        return Draft(name, feeds, chain, steps=tokens, places=tuple(places))


def _call(feed: Arrays) -> ChainCall:
    return ChainCall(feed["input_ids"], feed["new_tokens"], images=image_inputs(feed))
