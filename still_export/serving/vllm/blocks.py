"""How many blocks of its memory vLLM gives to a request's states: those of fixed size at once, the others as it grows.

vLLM counts blocks of all kinds of layers alike, so full attention has its own beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from still_export.mixers.base import Pages


@dataclass(frozen=True)
class StatesSpec(MambaSpec):  # type: ignore[misc]  # vLLM has no types here
    """What vLLM knows of a layer's memory: blocks are the pages of `pages`."""

    pages: Pages | None = None

    @classmethod
    def of(cls, spec: MambaSpec, pages: Pages) -> StatesSpec:
        """What vLLM would say of a layer with states, and its pages."""
        return cls(**{field.name: getattr(spec, field.name) for field in fields(spec)}, pages=pages)

    def blocks(self, tokens: int) -> int:
        """Of a request of `tokens` tokens."""
        assert self.pages is not None
        return self.pages.after(tokens)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        return self.blocks(vllm_config.model_config.max_model_len) * int(self.page_size_bytes)

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        assert self.pages is not None
        return self.pages.columns


class StatesManager(MambaManager):  # type: ignore[misc]
    """Hands out as many blocks as the spec says, where vLLM's own count one for so many tokens."""

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *rest: Any, **named: Any) -> int:
        return int(super().get_num_blocks_to_allocate(request_id, self._as_tokens(num_tokens), *rest, **named))

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *rest: Any, **named: Any) -> Any:
        return super().allocate_new_blocks(request_id, self._as_tokens(num_tokens), *rest, **named)

    def _as_tokens(self, tokens: int) -> int:
        """Tokens for which vLLM's own would hand out the blocks of `tokens`."""
        return int(self.kv_cache_spec.blocks(tokens) * self.block_size)


KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # vLLM registers its own specs here, but not behind another's
KVCacheSpecRegistry.register(StatesSpec, StatesManager)
