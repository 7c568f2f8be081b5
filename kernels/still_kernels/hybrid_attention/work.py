"""Hybrid attention for bench and tune: its layers, calls and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.cost import decode_cost, prefill_cost
from still_kernels.hybrid_attention.dispatch import hybrid_attention
from still_kernels.hybrid_attention.inputs import Inputs
from still_kernels.hybrid_attention.reference.chunked import chunked_hybrid_attention
from still_kernels.hybrid_attention.settings import INSTEAD, MOVES, SHARES, misfit
from still_kernels.hybrid_attention.state import HybridAttentionState
from still_kernels.tile import TileTable
from still_kernels.work import Kind, OpWork, Work, filled


def layer(sizes: Mapping[str, int], scope: str, context: int) -> HybridAttentionConfig:
    """A layer with room for `context` tokens and one chunk more."""
    return HybridAttentionConfig(
        num_heads=sizes["heads"],
        num_kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        chunk_size=sizes["chunk_size"],
        salient_per_chunk=sizes["salient_per_chunk"],
        capacity_tokens=context + sizes["chunk_size"],
        select_scope=scope,
    )


def kinds(context: int, batches: Sequence[int]) -> list[Kind]:
    """A prefill, and steps that do not promote and that do."""
    steps = [
        kind
        for batch in batches
        for kind in (Kind("decode", batch, 1, context - 1), Kind("decode, promoting", batch, 1, context))
    ]
    return [Kind("prefill", 1, context, 0), *steps]


def work(config: HybridAttentionConfig, kind: Kind, dtype: torch.dtype, device: str) -> Work:
    """Calls of one kind."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    shape, dim = (kind.batch, kind.tokens), config.head_dim
    query, gate = random(*shape, config.num_heads, dim), random(*shape, config.num_heads, dim).sigmoid()
    key, value = random(*shape, config.num_kv_heads, dim), random(*shape, config.num_kv_heads, dim)
    q_weight, k_weight = (random(config.num_heads, config.projection_dim, dim) * dim**-0.5 for _ in "qk")
    new = torch.full((kind.batch,), kind.tokens, device=device)
    inputs = Inputs(query, key, value, gate, q_weight, k_weight, new)

    def state() -> HybridAttentionState:
        made = HybridAttentionState.empty(config, kind.batch, dtype, device)
        made.length.fill_(kind.length)
        return filled(made, torch.Generator(device).manual_seed(1)) if kind.length else made

    def launch(state: HybridAttentionState, output: Tensor, table: TileTable) -> None:
        from still_kernels.hybrid_attention.launch import launch_hybrid_attention

        launch_hybrid_attention(inputs, config, state, output, table=table)

    step = kind.tokens == 1
    cost = decode_cost(config, kind.length, kind.batch) if step else prefill_cost(config, kind.tokens)
    return Work(
        *cost,
        state=state,
        reference=lambda state: chunked_hybrid_attention(inputs, config, state)[0],
        run=lambda state: hybrid_attention(inputs, config, state, in_place=True)[0],
        launch=launch,
        output=query,
    )


def _table(config: HybridAttentionConfig, device: torch.device, wide: bool) -> TileTable:
    from still_kernels.hybrid_attention.launch import device_table

    return device_table(config, device, wide)


WORK = OpWork(
    sizes={"heads": 32, "kv_heads": 8, "head_dim": 128, "chunk_size": 64, "salient_per_chunk": 4},
    layers={"q_head": "q_head", "kv_group_max": "kv_group_max"},
    layer=layer,
    kinds=kinds,
    work=work,
    table=_table,
    moves=MOVES,
    decode=frozenset({"decode"}),
    misfit=misfit,
    instead=INSTEAD,
    shares=SHARES,
)
