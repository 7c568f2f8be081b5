"""States at the ends of prefixes, cached in vLLM's memory blocks until it needs them. No vLLM.

A prefix is identified by vLLM's hash of all its tokens. A cached prefix owns read-only blocks. Blocks that the request still writes are
copied; finished blocks are shared. Each block has a unique key, which vLLM removes when it gives the block away. So a prefix is valid
while all its blocks have their keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

_serial = itertools.count()
_prefixes: WeakKeyDictionary[Any, Prefixes] = WeakKeyDictionary()


class Prefixes:
    """Cached prefixes in the blocks of one pool."""

    def __init__(self) -> None:
        self.kept: dict[tuple[Any, int], list[tuple[Any, Any]]] = {}
        self.sweep_at = 1024

    @staticmethod
    def of(pool: Any) -> Prefixes:
        """The Prefixes of a BlockPool, which all its users share."""
        return _prefixes.setdefault(pool, Prefixes())

    def find(self, end: Any, group: int) -> list[Any]:
        """The blocks of a prefix, in the order of a request's table; empty if one is lost.

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
        """A new unique key for a block."""
        return b"still" + next(_serial).to_bytes(8, "big")

    def keep(self, end: Any, group: int, blocks: Sequence[Any]) -> None:
        """Remember `blocks`, each of which has its key."""
        if len(self.kept) >= self.sweep_at:
            for one in list(self.kept):
                self.find(*one)
            self.sweep_at = max(1024, 2 * len(self.kept))
        self.kept[end, group] = [(block, block.block_hash) for block in blocks]
