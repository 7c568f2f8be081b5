"""Softmax attention for bench and tune: its layers, calls and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.attention.blocked import blocked_attention
from still_kernels.attention.cost import decode_cost, prefill_cost
from still_kernels.attention.dispatch import attention
from still_kernels.attention.inputs import Inputs
from still_kernels.attention.settings import MOVES, misfit
from still_kernels.attention.state import AttentionState
from still_kernels.tile import TileTable
from still_kernels.work import Kind, OpWork, Work, filled


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer, and the tokens that its state has room for."""

    heads: int
    kv_heads: int
    head_dim: int
    rows: int


def layer(sizes: Mapping[str, int], name: str, context: int) -> Layer:
    """A layer with room for `context` tokens and one more."""
    return Layer(sizes["heads"], sizes["kv_heads"], sizes["head_dim"], context + 1)


def kept(layer: Layer, kind: Kind, dtype: torch.dtype, device: str) -> AttentionState:
    """A layer's keys and values as the calls of one kind find them."""
    made = AttentionState.empty(kind.batch, layer.kv_heads, layer.head_dim, layer.rows, dtype, device)
    made.length.fill_(kind.length)
    return filled(made, torch.Generator(device).manual_seed(1)) if kind.length else made


def work(layer: Layer, kind: Kind, dtype: torch.dtype, device: str) -> Work:
    """Calls of one kind."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (layer.heads, layer.kv_heads, layer.head_dim)

    def random(heads: int) -> Tensor:
        shape = (kind.batch, kind.tokens, heads, layer.head_dim)
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    new = torch.full((kind.batch,), kind.tokens, device=device)
    inputs = Inputs(random(layer.heads), random(layer.kv_heads), random(layer.kv_heads), new)

    def launch(state: AttentionState, output: Tensor, table: TileTable) -> None:
        from still_kernels.attention.launch import launch_attention

        launch_attention(inputs, state, output, table=table)

    step = kind.tokens == 1
    cost = decode_cost(*sizes, kind.length, kind.batch) if step else prefill_cost(*sizes, kind.tokens)
    return Work(
        *cost,
        state=lambda: kept(layer, kind, dtype, device),
        reference=lambda state: blocked_attention(inputs, state)[0],
        run=lambda state: attention(inputs, state, in_place=True)[0],
        launch=launch,
        output=inputs.query,
    )


def _table(layer: Layer, device: torch.device, wide: bool) -> TileTable:
    from still_kernels.attention.launch import device_table

    return device_table(layer.head_dim, device, wide)


WORK = OpWork(
    sizes={"heads": 32, "kv_heads": 8, "head_dim": 128},
    layers={"softmax": None},
    layer=layer,
    work=work,
    table=_table,
    moves=MOVES,
    decode=frozenset({"decode"}),
    misfit=lambda table, layer, arch: misfit(table),
)
