"""Hybrid attention for an engine that serves many requests and owns their states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from still_export.errors import UnsupportedModelError
from still_export.mixers.cache_type import rounded
from still_export.mixers.paged import PagedLayer, PagedProjection, PagedTokens, heads_of_rank
from still_graphs.states import rows_after
from still_kernels.hybrid_attention.call import refusals
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.paged import hybrid_attention_paged
from still_kernels.hybrid_attention.pages import Pages
from still_kernels.hybrid_attention.spec import SLOTS
from still_kernels.packing import PagedStates


class PagedHybridAttention(PagedLayer):
    """One rank's heads of a layer.

    Args:
        ranks, rank: Number of ranks, and the number of this one.

    Raises:
        UnsupportedModelError: The heads cannot be divided among the ranks.
    """

    linear_states = (torch.float32, torch.bfloat16)
    codes = True

    def __init__(
        self, config: HybridAttentionConfig, gate_bias: bool, shared_feature_map: bool, ranks: int, rank: int
    ) -> None:
        self.config = part_of(config, ranks, rank)
        gated = config.gate == "channel"
        self.projections = {"g_proj": PagedProjection(config.head_dim, gate_bias)} if gated else {}
        self.names = ("query", "key", "value", *(["gate"] if gated else []))
        shape = (1 if shared_feature_map else config.num_heads, config.projection_dim, config.head_dim)
        self.head_weights = {"feature_q_weight": shape, "feature_k_weight": shape}

    def refusals(self, dtype: torch.dtype) -> list[str]:
        return refusals(self.config, dtype)

    def pages(
        self, tokens: int, capacity_tokens: int, dtype: torch.dtype, linear: torch.dtype = torch.float32
    ) -> Pages:
        rule = SLOTS.resolve(self.config.attributes())
        return Pages.of(self.config, rows_after(rule, tokens, capacity_tokens), dtype, linear)

    def inputs(self, packed: PagedTokens) -> dict[str, Tensor]:
        query, key, value = packed.heads
        query, key = packed.turn(query, key)
        cache = self.config.cache
        made = {"query": query, "key": rounded(key, cache), "value": rounded(value, cache)}
        if "g_proj" in packed.projected:
            made["gate"] = torch.sigmoid(packed.projected["g_proj"]).view(query.shape)
        return made

    def attend(
        self, heads: Mapping[str, Tensor], weights: Mapping[str, Tensor], states: PagedStates, output: Tensor
    ) -> None:
        inputs = Inputs(**{"gate": None, **heads, **weights})  # type: ignore[arg-type]
        hybrid_attention_paged(inputs, self.config, states, output)


def part_of(config: HybridAttentionConfig, ranks: int, rank: int) -> HybridAttentionConfig:
    """The layer of rank `rank` of `ranks`; with more ranks than key/value heads, several ranks have the same key/value heads."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    share, kv_share = heads_of_rank(heads, kv_heads, ranks)
    if ranks > kv_heads and config.select_scope != "q_head":
        raise UnsupportedModelError(
            f"select_scope={config.select_scope} selects for each of {kv_heads} key/value heads as a whole, which {ranks} ranks would "
            f"divide. Choose a --tensor-parallel-size of at most {kv_heads}."
        )
    factors = config.window_factor
    return replace(
        config,
        num_heads=share,
        num_kv_heads=kv_share,
        window_factor=None if factors is None else factors[rank * share : (rank + 1) * share],
    )
