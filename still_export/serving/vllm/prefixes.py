"""States at the ends of prefixes, kept in blocks of vLLM's memory until it needs them for something else. No vLLM.

A prefix is known by vLLM's hash of all its tokens. Its states lie in blocks that nobody writes to any more: copies of those that its
request goes on changing, and the others themselves, which later requests share. Each of these blocks bears a key that no other block ever
had; vLLM takes the key away when it gives the block to somebody else. So a prefix is there while all its blocks bear theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

_serial = itertools.count()
_prefixes: WeakKeyDictionary[Any, Prefixes] = WeakKeyDictionary()


class Prefixes:
    """What is kept in the blocks of one pool."""

    def __init__(self) -> None:
        self.kept: dict[tuple[Any, int], list[tuple[Any, Any]]] = {}
        self.sweep_at = 1024

    @staticmethod
    def of(pool: Any) -> Prefixes:
        """Those of a BlockPool; its users have nothing else in common."""
        return _prefixes.setdefault(pool, Prefixes())

    def find(self, end: Any, group: int) -> list[Any]:
        """The blocks of a prefix, in the order of a request's table; none where one is lost.

        Args:
            end: vLLM's hash of all its tokens.
            group: Of layers.
        """
        kept = self.kept.get((end, group), [])
        if any(block.block_hash != key for block, key in kept):
            del self.kept[end, group]
            return []
        return [block for block, _ in kept]

    @staticmethod
    def new_key() -> bytes:
        """A key for a block, which no other has or had."""
        return b"still" + next(_serial).to_bytes(8, "big")

    def keep(self, end: Any, group: int, blocks: Sequence[Any]) -> None:
        """Remember `blocks`, each of which bears its key."""
        if len(self.kept) >= self.sweep_at:
            for one in list(self.kept):
                self.find(*one)
            self.sweep_at = max(1024, 2 * len(self.kept))
        self.kept[end, group] = [(block, block.block_hash) for block in blocks]
