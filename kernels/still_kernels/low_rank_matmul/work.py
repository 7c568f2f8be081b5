"""Products with two thin matrices for bench and tune: their sizes, calls and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.dense_matmul.work import SIZES, drawn, kinds
from still_kernels.low_rank_matmul.dispatch import low_rank_matmul
from still_kernels.low_rank_matmul.inputs import Inputs
from still_kernels.low_rank_matmul.settings import MOVES
from still_kernels.low_rank_matmul.tiles import tile_table
from still_kernels.tile import TileTable
from still_kernels.work import Held, Kind, OpWork, Work

RANK = 16
"""Of a LoRA pair; those of query, key and value lie side by side."""


@dataclass(frozen=True)
class Layer:
    """Inputs, numbers between, outputs."""

    inputs: int
    rank: int
    outputs: int


def layer(sizes: Mapping[str, int], name: str, context: int) -> Layer:
    """Pairs of a model of the given sizes."""
    hidden = sizes["heads"] * sizes["head_dim"]
    if name == "output":
        return Layer(hidden, RANK, hidden)
    return Layer(hidden, 3 * RANK, hidden + 2 * sizes["kv_heads"] * sizes["head_dim"])


def work(layer: Layer, kind: Kind, dtype: torch.dtype, device: str) -> Work:
    """Calls of one kind, added to something. Beside them cuBLAS."""
    rows = (kind.batch, kind.tokens)
    tokens = torch.randn(*rows, layer.inputs, device=device).to(dtype)
    base = torch.randn(*rows, layer.outputs, device=device).to(dtype)

    def state() -> Held:
        generator = torch.Generator(device).manual_seed(0)
        shapes = (layer.inputs, layer.rank), (layer.rank, layer.outputs)
        inner, outer = (drawn(shape, tokens, generator) for shape in shapes)
        return Held(Inputs(tokens, inner, outer, base), ("inner", "outer"))

    def plain(state: Held) -> Tensor:
        return base + (tokens @ state.inputs.inner) @ state.inputs.outer

    def launch(state: Held, output: Tensor, table: TileTable) -> None:
        from still_kernels.low_rank_matmul.launch import launch_low_rank_matmul

        launch_low_rank_matmul(state.inputs, output, table=table)

    thin = layer.rank * (layer.inputs + layer.outputs)
    return Work(
        float((tokens.numel() + 2 * base.numel() + thin) * tokens.element_size()),
        2.0 * rows[0] * rows[1] * thin,
        state=state,
        reference=plain,
        run=lambda state: low_rank_matmul(state.inputs),
        launch=launch,
        output=torch.empty_like(base),
        peers={"cuBLAS": plain} if device == "cuda" else {},
    )


WORK = OpWork(
    sizes=SIZES,
    layers={"query, key, value": None, "output": None},
    layer=layer,
    kinds=kinds,
    work=work,
    table=lambda layer, device, wide: tile_table(),
    moves=MOVES,
    decode=frozenset({"low_rank"}),
    misfit=lambda table, layer, arch: "",
)
