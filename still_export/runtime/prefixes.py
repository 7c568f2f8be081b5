"""What was read once is not read again: states by the tokens that led to them, in a radix tree whose bytes are bounded.

Exports copy this file into packages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from still_export.runtime.base import Runner
from still_export.runtime.decoding import Progress
from still_export.runtime.sampling import RunError
from still_graphs.states import StateTable

if TYPE_CHECKING:
    from still_export.runtime.prefix_folder import PrefixFolder
    from still_export.runtime.snapshot import Snapshot

Arrays = Mapping[str, np.ndarray]


@dataclass(eq=False)
class Kept:
    """A place in the tree behind the `edge` of tokens from its parent, and the state that is kept there, if any.

    A state is the parts of its tensors, in order along the axis on which each grows: those that did not change since a shorter prefix was
    kept are that prefix's own. tokens: How many lead here. length: Of the sequence. worth: What is least goes first.
    """

    edge: np.ndarray
    parent: Kept | None = None
    children: dict[int, Kept] = field(default_factory=dict)
    shelved: bool = False
    parts: dict[str, list[np.ndarray]] | None = None
    tokens: int = 0
    length: int = 0
    cost: float = 0.0
    worth: float = 0.0

    def path(self) -> np.ndarray:
        """The tokens from the root to here."""
        return self.edge if self.parent is None else np.concatenate([self.parent.path(), self.edge])


class PrefixCache:
    """States of one package and one adapter, found by the longest prefix of a prompt.

    A state that goes costs the tokens behind the next shorter one; those with the least of them for their bytes and their last use go
    first (GreedyDual). Not for threads, but that numbers may be read.

    Args:
        table: Of the package's states.
        most_bytes: Of all states together; one that is larger alone is not kept.
        shelf: For states that outlive the process.

    Attributes:
        bytes: Memory in use. asked, found: Tokens of prompts, and those among them that were not read again.
    """

    def __init__(self, table: StateTable, most_bytes: int, shelf: PrefixFolder | None = None) -> None:
        self.most_bytes, self.shelf = most_bytes, shelf
        self._axes = {s.name: int(s.growth["axis"]) if s.growth else 0 for s in table}
        self.asked = self.found = 0
        self.clear()
        for tokens in shelf.prefixes() if shelf else []:
            self._insert(tokens).shelved = True

    def clear(self) -> None:
        """Forget all; what is on the shelf stays there, and is not found any more."""
        self._root = Kept(np.zeros(0, np.int32))
        self._holders: set[Kept] = set()
        self._uses: Counter[int] = Counter()
        self.bytes, self._clock = 0, 0.0

    def close(self) -> None:
        """Wait until all is on the shelf."""
        if self.shelf:
            self.shelf.close()

    @property
    def states(self) -> int:
        """Number of cached states."""
        return len(self._holders)

    def known(self, tokens: Sequence[int]) -> int:
        """How far the beginning of `tokens` goes along one that was kept; a state there would serve both."""
        return self._walk(np.asarray(tokens, np.int32))[1]

    def find(self, tokens: Sequence[int]) -> Kept | None:
        """The state behind the longest kept prefix of `tokens` that leaves one of them to read."""
        for node in reversed(self._walk(np.asarray(tokens, np.int32)[:-1])[0]):
            if node.parts is None and node.shelved and self.shelf:
                try:
                    state, length = self.shelf.read(node.path())
                    if self._fits(state):
                        self._keep(node, state, length)
                except RunError:  # damaged, or gone: the shelf has said so
                    node.shelved = False
                    self._prune(node)
            if node.parts is not None:
                node.worth = self._clock + node.cost
                return node
        return None

    def state(self, node: Kept) -> dict[str, np.ndarray]:
        """Its tensors, as `Runner.take` gave them."""
        parts = (node.parts or {}).items()
        return {n: p[0] if len(p) == 1 else np.concatenate(p, self._axes[n]) for n, p in parts}

    def keep(self, tokens: Sequence[int], state: Arrays, length: int, lasting: bool = False) -> None:
        """Keep a copy of a state.

        Args:
            tokens: That lead to it.
            state: As `Runner.take` gives it.
            length: Of the sequence.
            lasting: Put it on the shelf too.
        """
        key = np.asarray(tokens, np.int32)
        if not key.size or not self._fits(state):
            return
        node = self._insert(key)
        if node.parts is None:
            self._keep(node, state, length)
        if lasting and self.shelf and not node.shelved:
            node.shelved = True
            self.shelf.write(key, self.state(node), length)

    def _fits(self, state: Arrays) -> bool:
        return sum(array.nbytes for array in state.values()) <= self.most_bytes

    def _keep(self, node: Kept, state: Arrays, length: int) -> None:
        above = node.parent
        while above is not None and above.parts is None:
            above = above.parent
        shared = (above.parts if above else None) or {}
        node.parts = {name: _parts(array, self._axes[name], shared.get(name, [])) for name, array in state.items()}
        before, node.tokens, node.length = self.bytes, node.path().size, length
        self._count(node, 1)
        node.cost = (node.tokens - (above.tokens if above else 0)) / max(1, self.bytes - before)
        node.worth = self._clock + node.cost
        self._holders.add(node)
        while self.bytes > self.most_bytes and len(self._holders) > 1:
            least = min(self._holders - {node}, key=lambda n: n.worth)
            self._clock = least.worth
            self._holders.remove(least)
            self._count(least, -1)
            least.parts = None
            self._prune(least)

    def _count(self, node: Kept, change: int) -> None:
        """Count the bytes of parts that no other state has."""
        for part in (p for parts in (node.parts or {}).values() for p in parts):
            self._uses[id(part)] += change
            if self._uses[id(part)] == max(0, change):
                self.bytes += change * part.nbytes
            if not self._uses[id(part)]:
                del self._uses[id(part)]

    def _walk(self, tokens: np.ndarray) -> tuple[list[Kept], int]:
        """The nodes along `tokens`, and how many of them are in the tree."""
        path, at, node = list[Kept](), 0, self._root
        while at < tokens.size and (child := node.children.get(int(tokens[at]))) is not None:
            same = alike(child.edge, tokens[at:])
            at += same
            if same < child.edge.size:
                break
            path.append(child)
            node = child
        return path, at

    def _insert(self, tokens: np.ndarray) -> Kept:
        """The node behind `tokens`, which edges are split for."""
        node, at = self._root, 0
        while at < tokens.size:
            first = int(tokens[at])
            child = node.children.get(first)
            if child is None:
                node.children[first] = child = Kept(tokens[at:].copy(), node)
                return child
            same = alike(child.edge, tokens[at:])
            if same < child.edge.size:
                upper = Kept(child.edge[:same], node, {int(child.edge[same]): child})
                child.edge, child.parent, node.children[first] = child.edge[same:], upper, upper
                child = upper
            node, at = child, at + same
        return node

    def _prune(self, node: Kept) -> None:
        """Take away nodes that hold nothing and lead nowhere, and join edges between which nothing is held."""
        while node.parent is not None and node.parts is None and not node.shelved and len(node.children) < 2:
            above, first = node.parent, int(node.edge[0])
            if node.children:
                (child,) = node.children.values()
                child.edge, child.parent = np.concatenate([node.edge, child.edge]), above
                above.children[first] = child
                return
            del above.children[first]
            node = above


class Reader:
    """A model of one sequence that reads nothing twice which it has in its state, or which a cache knows.

    Args:
        model: Of a batch of one.
        cache: None: the model's own state alone.
        prefix: What the model has read before the first token.
    """

    def __init__(self, model: Runner, cache: PrefixCache | None, prefix: Snapshot | None) -> None:
        self.model, self.cache, self.prefix = model, cache, prefix
        self._beginning = list(prefix.key()) if prefix else []
        self._base = model.feeding.given(prefix.length) if prefix else 0
        self._has: list[int] = []  # what the model has read behind the prefix, where that is known

    def restart(self, more: int = 0) -> None:
        """Put the model behind the prefix, with room for so many tokens."""
        if self.prefix is None:
            self.model.start()
        else:
            self.prefix.restore(self.model, more)

    def begin(self, tokens: list[int], progress: Progress | None = None, settled: int = 0) -> tuple[int, Progress]:
        """Put the model behind the longest beginning of `tokens` that is known, and leaves one to read.

        Args:
            tokens: Behind the prefix.
            progress: Called with the pieces that are read.
            settled: As many of them begin later prompts, too; where they are not all, their state is read and kept.

        Returns:
            Number of tokens that need not be read, and the pieces of the others.
        """
        has, self._has = self._has, []
        live = len(has) if tokens[: len(has)] == has and len(has) < len(tokens) else 0
        feeding = self.model.feeding
        if feeding.whole_prompts or self.model.length.tolist() != [feeding.length(self._base + live)]:
            live = 0  # the model decides anew, or someone else has used it
        kept = self.cache.find(self._beginning + tokens) if self.cache else None
        found = kept.tokens - len(self._beginning) if kept else 0
        if self.cache and kept and found > live:
            self.model.put(0, self.cache.state(kept), kept.length)
        elif not live:
            self.restart(len(tokens))
        found = max(found, live)
        if self.cache:
            self.cache.asked += len(tokens)
            self.cache.found += found
            if found < settled < len(tokens):
                self.model.prefill(tokens[found:settled], progress)
                self._keep(tokens[:settled])
                found = settled

        def told(done: int, total: int) -> None:
            if done == total:
                self._keep(tokens)
            if progress is not None:
                progress(done, total)

        return found, told

    def end(self, tokens: list[int]) -> None:
        """`tokens` are what was given and answered, whose last ones the model may not have read."""
        self._has = self._keep(tokens)

    def _keep(self, tokens: list[int]) -> list[int]:
        length = int(self.model.length[0])
        read = tokens[: self.model.feeding.given(length) - self._base]
        if self.cache:
            self.cache.keep(self._beginning + read, self.model.take(), length, lasting=True)
        return read


def alike(one: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray) -> int:
    """How many tokens two begin alike with."""
    size = min(len(one), len(other))
    different = np.flatnonzero(np.asarray(one[:size]) != np.asarray(other[:size]))
    return int(different[0]) if different.size else size


def _parts(array: np.ndarray, axis: int, shared: list[np.ndarray]) -> list[np.ndarray]:
    """`array` along `axis`: those of `shared` that it begins with, which need not be copied, and a copy of what is left."""
    found, rows = list[np.ndarray](), np.moveaxis(array, axis, 0)
    at = 0
    for part in shared:
        end = at + part.shape[axis]
        if end > len(rows) or not np.array_equal(np.moveaxis(part, axis, 0), rows[at:end]):
            break
        found.append(part)
        at = end
    if at < len(rows) or not found:
        found.append(np.moveaxis(rows[at:], 0, axis).copy())
    return found
