"""States at the ends of prefixes, kept in blocks of vLLM's memory until vLLM reuses them. No vLLM.

A prefix is identified by vLLM's hash of all its tokens. A cached prefix owns read-only blocks. Blocks that the request still writes are
copied; finished blocks are shared. Each block carries a unique key, which vLLM removes when it reuses the block. A prefix is valid while
all its blocks carry their keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

_serial = itertools.count()
_prefixes: WeakKeyDictionary[Any, Prefixes] = WeakKeyDictionary()


class Prefixes:
    """Prefixes in the blocks of one pool."""

    def __init__(self) -> None:
        self.entries: dict[tuple[Any, int], list[tuple[Any, Any]]] = {}
        self.sweep_at = 1024

    @staticmethod
    def of(pool: Any) -> Prefixes:
        """The prefixes of a BlockPool, the only object that its users share."""
        return _prefixes.setdefault(pool, Prefixes())

    def find(self, end: Any, group: int) -> list[Any]:
        """The blocks of a prefix in the order of a request's table; [] if one was reused.

        Args:
            end: vLLM's hash of all its tokens.
            group: Group of layers.
        """
        pairs = self.entries.get((end, group), [])
        if any(block.block_hash != key for block, key in pairs):
            del self.entries[end, group]
            return []
        return [block for block, _ in pairs]

    @staticmethod
    def new_key() -> bytes:
        """A key that no other block has or had."""
        return b"still" + next(_serial).to_bytes(8, "big")

    def keep(self, end: Any, group: int, blocks: Sequence[Any]) -> None:
        """Remember `blocks`, which carry their keys."""
        if len(self.entries) >= self.sweep_at:
            for one in list(self.entries):
                self.find(*one)
            self.sweep_at = max(1024, 2 * len(self.entries))
        self.entries[end, group] = [(block, block.block_hash) for block in blocks]
