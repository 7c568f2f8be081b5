"""Numbers of vLLM's memory blocks for a request's states: those of fixed size at once, the others as the request grows.

vLLM counts blocks of all kinds of layers alike, so full attention has blocks of its own as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from still_export.mixers.paged import Pages
from still_export.serving.vllm.prefixes import Prefixes

SPARE = 4
"""Copies of a prefix's states that must fit before one is made, so that no request is preempted for it."""


@dataclass(frozen=True)
class StatesSpec(MambaSpec):  # type: ignore[misc]  # vLLM is untyped
    """vLLM's description of a layer's memory: blocks are the pages of `pages`.

    Args:
        every: Tokens between prefixes that may be cached, a multiple of block_size, which must be equal for all layers.
    """

    pages: Pages | None = None
    every: int = 1

    @classmethod
    def of(cls, spec: MambaSpec, pages: Pages, **more: Any) -> StatesSpec:
        """vLLM's spec of a layer with states, with its pages."""
        return cls(**{**{field.name: getattr(spec, field.name) for field in fields(spec)}, **more}, pages=pages)

    def blocks(self, tokens: int) -> int:
        """Blocks for a request of `tokens` tokens."""
        assert self.pages is not None
        return self.pages.after(tokens)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        return self.blocks(vllm_config.model_config.max_model_len) * int(self.page_size_bytes)

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        assert self.pages is not None
        return max(self.pages.columns, -(-max_len // self.block_size))  # vLLM looks up a block for each token


class StatesManager(MambaManager):  # type: ignore[misc]
    """Allocates as many blocks as the spec requires; vLLM's own manager counts one per so many tokens. With prefix caching, stores states
    and shares them with requests of the same beginning."""

    def __init__(self, kv_cache_spec: StatesSpec, block_pool: Any, **named: Any) -> None:
        super().__init__(kv_cache_spec, block_pool, **named)
        self.prefixes = Prefixes.of(block_pool)
        assert kv_cache_spec.pages is not None
        self.pages = kv_cache_spec.pages
        self.seen: dict[str, int] = {}  # tokens of a request after the last step that scheduled it
        self.ends: dict[
            str, tuple[int, Any]
        ] = {}  # requests whose last step ended where a prefix may be cached: its tokens and hash
        self.granted: set[str] = set()  # those of them with room for the copy
        self.shared: dict[str, Sequence[int]] = {}  # requests that begin with a cached prefix: columns to copy

    # Requests.

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        *rest: Any,
        **named: Any,
    ) -> int:
        pool, found = self.block_pool, list(new_computed_blocks)
        if found and found[0].block_hash in self.cached_blocks_this_step:
            return (
                int(pool.num_gpu_blocks) + 1
            )  # more than exist: its states are copied in this step, so they can be used in the next
        owned = len(self.req_to_blocks.get(request_id, ()))
        needed = max(0, self.kv_cache_spec.blocks(num_tokens) - owned - len(found))
        if found:
            needed += len(self.pages.changing(num_local_computed_tokens)) + self._get_num_evictable_blocks(found)
        self.granted.discard(request_id)
        if request_id in self.ends:
            copies = len(self.pages.changing(self.ends[request_id][0]))
            if pool.get_num_free_blocks() >= needed + owned + SPARE * copies:
                self.granted.add(request_id)
                needed += copies
        return needed

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[Any], num_local_computed_tokens: int, *rest: Any
    ) -> None:
        blocks = self.req_to_blocks[request_id]
        assert not blocks
        if new_computed_blocks:
            self.block_pool.touch(new_computed_blocks)
            blocks.extend(new_computed_blocks)
            self.shared[request_id] = self.pages.changing(num_local_computed_tokens)
        self.num_cached_block[request_id] = 0  # marks the request as running in vLLM

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *rest: Any, **named: Any) -> list[Any]:
        pool, blocks, added = self.block_pool, self.req_to_blocks[request_id], []
        end = self.ends.pop(request_id, None)
        if end is not None and request_id in self.granted:
            self._keep(blocks, *end)
        for column in self.shared.pop(request_id, ()):
            (own,) = pool.get_new_blocks(1)
            self._apply_cow(request_id, column, blocks[column], own)
            added.append(own)
        grown = max(0, self.kv_cache_spec.blocks(num_tokens) - len(blocks))
        if grown:
            new = pool.get_new_blocks(grown)
            blocks.extend(new)
            added += new
            if self._record_new_block_ids:
                self.new_block_ids.extend(block.block_id for block in new)
        self.seen[request_id] = num_tokens
        return added

    # Prefix caching.

    def _keep(self, blocks: Sequence[Any], tokens: int, end: Any) -> None:
        """Copy the blocks that the request will change; vLLM does it before the step, with all copies of the step at once."""
        cached = list(blocks[: self.kv_cache_spec.blocks(tokens)])
        for column in self.pages.changing(tokens):
            (copy,) = self.block_pool.get_new_blocks(1)
            self._pending_cow_copies.append((cached[column], copy))
            cached[column].ref_cnt += 1  # released after the copy, like the copy itself
            cached[column] = copy
        for block in cached:
            if block.block_hash is None:
                key = make_block_hash_with_group_id(Prefixes.new_key(), self.kv_cache_group_id)
                self.block_pool._insert_block_hash(key, block, num_tokens=tokens)
        self.prefixes.keep(end, self.kv_cache_group_id, cached)
        self.cached_blocks_this_step.add(cached[0].block_hash)

    def cache_blocks(self, request: Any, num_tokens: int, *rest: Any, **named: Any) -> None:
        name, unit = request.request_id, self.block_pool.hash_block_size
        self.ends.pop(name, None)
        if (
            self.seen.get(name) != num_tokens
            or num_tokens % self.kv_cache_spec.every
            or len(request.block_hashes) * unit < num_tokens
        ):
            return
        end = request.block_hashes[num_tokens // unit - 1]
        if not self.prefixes.find(end, self.kv_cache_group_id):
            self.ends[name] = num_tokens, end

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Sequence[Any],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        block_pool: Any,
        kv_cache_spec: StatesSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        *rest: Any,
        **named: Any,
    ) -> tuple[tuple[list[Any], ...], int]:
        prefixes, unit = Prefixes.of(block_pool), block_pool.hash_block_size
        step = math.lcm(alignment_tokens, kv_cache_spec.every)
        for tokens in range(max_length // step * step, 0, -step):
            end = block_hashes[tokens // unit - 1]
            found = tuple(prefixes.find(end, group) for group in kv_cache_group_ids)
            if all(found):
                return found, tokens
        return tuple([] for _ in kv_cache_group_ids), 0

    def pop_blocks_for_free(self, request_id: str) -> Any:
        for known in (self.seen, self.ends, self.shared):
            known.pop(request_id, None)  # type: ignore[attr-defined]
        self.granted.discard(request_id)
        return super().pop_blocks_for_free(request_id)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0  # no block can be freed early, as vLLM's manager would: blocks are not in token order


KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # vLLM registers its own specs only before others
KVCacheSpecRegistry.register(StatesSpec, StatesManager)
