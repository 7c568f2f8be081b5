"""The prefix cache: states by the tokens that led to them, in a radix tree of bounded size.

Exports copy this file into packages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from still_export.runtime.base import Runner
from still_export.runtime.decoding import Progress
from still_export.runtime.sampling import RunError
from still_graphs.states import StateTable

if TYPE_CHECKING:
    from still_export.runtime.snapshot import Snapshot

Arrays = Mapping[str, np.ndarray]


class PrefixStore(Protocol):
    """States that outlive the process; `PrefixFolder` is one."""

    def prefixes(self) -> list[np.ndarray]: ...
    def read(self, tokens: np.ndarray) -> tuple[Arrays, int]: ...
    def write(self, tokens: np.ndarray, state: Arrays, length: int) -> None: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class CachedPrefix:
    """A node of the tree: the tokens from its parent (`edge`), and a state, if one is cached here.

    parts: Each state tensor in pieces along the axis on which it grows. Pieces that equal those of a shorter prefix are shared with it.
    tokens: Number of tokens from the root. length: Of the sequence. worth: The node of least worth is evicted first.
    """

    edge: np.ndarray
    parent: CachedPrefix | None = None
    children: dict[int, CachedPrefix] = field(default_factory=dict)
    on_disk: bool = False
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

    GreedyDual eviction: losing a state costs the tokens after the next shorter one; the state with the lowest cost for its bytes goes
    first, unless it was used lately. Not thread-safe, except reading the counters.

    Args:
        table: The package's states.
        most_bytes: Of all states together; a larger state is not cached.
        folder: Stores states that outlive the process.

    Attributes:
        bytes: Memory in use. prompt_tokens: Tokens of all prompts. hit_tokens: Those of them that were in the cache.
    """

    def __init__(self, table: StateTable, most_bytes: int, folder: PrefixStore | None = None) -> None:
        self.most_bytes, self.folder = most_bytes, folder
        self._axes = {s.name: int(s.growth["axis"]) if s.growth else 0 for s in table}
        self.prompt_tokens = self.hit_tokens = 0
        self.clear()
        for tokens in folder.prefixes() if folder else []:
            self._insert(tokens).on_disk = True

    def clear(self) -> None:
        """Empty the cache. Files in the folder stay, but are no longer found."""
        self._root = CachedPrefix(np.zeros(0, np.int32))
        self._with_state: set[CachedPrefix] = set()
        self._uses: Counter[int] = Counter()
        self.bytes, self._clock = 0, 0.0

    def close(self) -> None:
        """Wait until all states are written to the folder."""
        if self.folder:
            self.folder.close()

    @property
    def states(self) -> int:
        """Number of cached states."""
        return len(self._with_state)

    def known(self, tokens: Sequence[int]) -> int:
        """Length of the longest prefix that `tokens` share with a cached sequence."""
        return self._walk(np.asarray(tokens, np.int32))[1]

    def find(self, tokens: Sequence[int]) -> CachedPrefix | None:
        """The node of the longest cached prefix of `tokens`, excluding their last."""
        for node in reversed(self._walk(np.asarray(tokens, np.int32)[:-1])[0]):
            if node.parts is None and node.on_disk and self.folder:
                try:
                    state, length = self.folder.read(node.path())
                    if self._fits(state):
                        self._keep(node, state, length)
                except RunError:  # damaged, or gone: the folder has reported it
                    node.on_disk = False
                    self._prune(node)
            if node.parts is not None:
                node.worth = self._clock + node.cost
                return node
        return None

    def state(self, node: CachedPrefix) -> dict[str, np.ndarray]:
        """The node's state tensors, as `Runner.take` returns them."""
        parts = (node.parts or {}).items()
        return {n: p[0] if len(p) == 1 else np.concatenate(p, self._axes[n]) for n, p in parts}

    def keep(self, tokens: Sequence[int], state: Arrays, length: int, lasting: bool = False) -> None:
        """Cache a copy of a state.

        Args:
            tokens: The tokens that led to it.
            state: As `Runner.take` returns it.
            length: Of the sequence.
            lasting: Write it to the folder too.
        """
        key = np.asarray(tokens, np.int32)
        if not key.size or not self._fits(state):
            return
        node = self._insert(key)
        if node.parts is None:
            self._keep(node, state, length)
        if lasting and self.folder and not node.on_disk:
            node.on_disk = True
            self.folder.write(key, self.state(node), length)

    def _fits(self, state: Arrays) -> bool:
        return sum(array.nbytes for array in state.values()) <= self.most_bytes

    def _keep(self, node: CachedPrefix, state: Arrays, length: int) -> None:
        above = node.parent
        while above is not None and above.parts is None:
            above = above.parent
        shared = (above.parts if above else None) or {}
        node.parts = {name: _parts(array, self._axes[name], shared.get(name, [])) for name, array in state.items()}
        before, node.tokens, node.length = self.bytes, node.path().size, length
        self._count(node, 1)
        node.cost = (node.tokens - (above.tokens if above else 0)) / max(1, self.bytes - before)
        node.worth = self._clock + node.cost
        self._with_state.add(node)
        while self.bytes > self.most_bytes and len(self._with_state) > 1:
            least = min(self._with_state - {node}, key=lambda n: n.worth)
            self._clock = least.worth
            self._with_state.remove(least)
            self._count(least, -1)
            least.parts = None
            self._prune(least)

    def _count(self, node: CachedPrefix, change: int) -> None:
        """Count the bytes of pieces that no other state shares."""
        for part in (p for parts in (node.parts or {}).values() for p in parts):
            self._uses[id(part)] += change
            if self._uses[id(part)] == max(0, change):
                self.bytes += change * part.nbytes
            if not self._uses[id(part)]:
                del self._uses[id(part)]

    def _walk(self, tokens: np.ndarray) -> tuple[list[CachedPrefix], int]:
        """The nodes along `tokens`, and the number of tokens that are in the tree."""
        path, at, node = list[CachedPrefix](), 0, self._root
        while at < tokens.size and (child := node.children.get(int(tokens[at]))) is not None:
            same = alike(child.edge, tokens[at:])
            at += same
            if same < child.edge.size:
                break
            path.append(child)
            node = child
        return path, at

    def _insert(self, tokens: np.ndarray) -> CachedPrefix:
        """The node at the end of `tokens`; splits an edge where needed."""
        node, at = self._root, 0
        while at < tokens.size:
            first = int(tokens[at])
            child = node.children.get(first)
            if child is None:
                node.children[first] = child = CachedPrefix(tokens[at:].copy(), node)
                return child
            same = alike(child.edge, tokens[at:])
            if same < child.edge.size:
                upper = CachedPrefix(child.edge[:same], node, {int(child.edge[same]): child})
                child.edge, child.parent, node.children[first] = child.edge[same:], upper, upper
                child = upper
            node, at = child, at + same
        return node

    def _prune(self, node: CachedPrefix) -> None:
        """Remove leaves without a state, and join edges at nodes without a state."""
        while node.parent is not None and node.parts is None and not node.on_disk and len(node.children) < 2:
            above, first = node.parent, int(node.edge[0])
            if node.children:
                (child,) = node.children.values()
                child.edge, child.parent = np.concatenate([node.edge, child.edge]), above
                above.children[first] = child
                return
            del above.children[first]
            node = above


class Reader:
    """Feeds prompts to a model of one sequence, reusing its state and the cache.

    Args:
        model: Of a batch of one.
        cache: None: the model's own state alone.
        prefix: What the model has read before the first token.
    """

    def __init__(self, model: Runner, cache: PrefixCache | None, prefix: Snapshot | None) -> None:
        self.model, self.cache, self.prefix = model, cache, prefix
        self._beginning = list(prefix.key()) if prefix else []
        self._base = model.feeding.text_tokens(prefix.length) if prefix else 0
        self._has: list[int] = []  # tokens after the prefix, if known

    def restart(self, more: int = 0) -> None:
        """Set the model to the prefix, with room for `more` tokens."""
        if self.prefix is None:
            self.model.start()
        else:
            self.prefix.restore(self.model, more)

    def begin(self, tokens: list[int], progress: Progress | None = None, settled: int = 0) -> tuple[int, Progress]:
        """Restore the state of the longest cached prefix of `tokens`, excluding their last.

        Args:
            tokens: After the prefix.
            progress: Called with the pieces that are read.
            settled: Number of first tokens that later prompts begin with, too. If they are not all, their state is read and cached.

        Returns:
            (tokens that need not be read, progress callback for the others).
        """
        has, self._has = self._has, []
        live = len(has) if tokens[: len(has)] == has and len(has) < len(tokens) else 0
        feeding = self.model.feeding
        if feeding.whole_prompts or self.model.length.tolist() != [feeding.length(self._base + live)]:
            live = 0  # the model decides by the whole prompt, or another caller has used it
        prefix = self.cache.find(self._beginning + tokens) if self.cache else None
        found = prefix.tokens - len(self._beginning) if prefix else 0
        if self.cache and prefix and found > live:
            self.model.put(0, self.cache.state(prefix), prefix.length)
        elif not live:
            self.restart(len(tokens))
        found = max(found, live)
        if self.cache:
            self.cache.prompt_tokens += len(tokens)
            self.cache.hit_tokens += found
            if found < settled < len(tokens):
                self.model.prefill(tokens[found:settled], progress)
                self._keep(tokens[:settled])
                found = settled

        def report(done: int, total: int) -> None:
            if done == total:
                self._keep(tokens)
            if progress is not None:
                progress(done, total)

        return found, report

    def end(self, tokens: list[int]) -> None:
        """Cache the state after prompt and answer, `tokens`. The model may not have read the last of them."""
        self._has = self._keep(tokens)

    def _keep(self, tokens: list[int]) -> list[int]:
        length = int(self.model.length[0])
        read = tokens[: self.model.feeding.text_tokens(length) - self._base]
        if self.cache:
            self.cache.keep(self._beginning + read, self.model.take(), length, lasting=True)
        return read


def alike(one: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray) -> int:
    """Length of the longest common prefix."""
    size = min(len(one), len(other))
    different = np.flatnonzero(np.asarray(one[:size]) != np.asarray(other[:size]))
    return int(different[0]) if different.size else size


def _parts(array: np.ndarray, axis: int, shared: list[np.ndarray]) -> list[np.ndarray]:
    """Pieces of `array` along `axis`: those of `shared` that it begins with, then a copy of the rest."""
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
