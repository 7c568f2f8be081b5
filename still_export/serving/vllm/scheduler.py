"""vLLM's schedulers with steps that end where states of prefixes may be cached."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class _AtEnds:
    """Splits prompts there as well."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.need_mamba_block_aligned_split = True
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]  # type: ignore[attr-defined]
        self.every = max(getattr(spec, "every", 1) for spec in specs)

    def _mamba_block_aligned_split(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        begin = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        return min(num_new_tokens, self.every - begin % self.every)


class PrefixScheduler(_AtEnds, Scheduler):  # type: ignore[misc]  # vLLM is untyped
    """The synchronous scheduler."""


class AsyncPrefixScheduler(_AtEnds, AsyncScheduler):  # type: ignore[misc]
    """The scheduler that plans a step while the one before runs."""


def prefix_scheduler(vllm_config: Any, **named: Any) -> Scheduler:
    """The scheduler that vLLM would use; vLLM decides after it has requested the class."""
    chosen = AsyncPrefixScheduler if vllm_config.scheduler_config.async_scheduling else PrefixScheduler
    return chosen(vllm_config=vllm_config, **named)
