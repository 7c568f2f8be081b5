"""Roundings of keys and values for bench and tune: their sizes, calls and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.codes import rounded
from still_kernels.dense_matmul.work import SIZES, kinds
from still_kernels.round_key_value.dispatch import round_key_value
from still_kernels.round_key_value.inputs import Inputs
from still_kernels.round_key_value.settings import MOVES
from still_kernels.round_key_value.tiles import tile_table
from still_kernels.tile import TileTable
from still_kernels.work import Held, Kind, OpWork, Work


@dataclass(frozen=True)
class Layer:
    """Heads of keys and values, and numbers of each."""

    heads: int
    head_dim: int


def layer(sizes: Mapping[str, int], name: str, context: int) -> Layer:
    """A layer of a model of the given sizes."""
    return Layer(sizes["kv_heads"], sizes["head_dim"])


def work(layer: Layer, kind: Kind, dtype: torch.dtype, device: str) -> Work:
    """Calls of one kind; keys and values are one behind the other. Beside them PyTorch's operators."""
    shape = (kind.batch, kind.tokens, layer.heads, layer.head_dim)
    key, value = (torch.randn(shape, device=device).to(dtype) for _ in range(2))

    def plain(state: Held) -> Tensor:
        return torch.stack((rounded(key), rounded(value)))

    def launch(state: Held, output: Tensor, table: TileTable) -> None:
        from still_kernels.round_key_value.launch import launch_round_key_value

        launch_round_key_value(state.inputs, *output, table=table)

    return Work(
        float(4 * key.numel() * key.element_size()),
        8.0 * key.numel(),
        state=lambda: Held(Inputs(key, value)),
        reference=plain,
        run=lambda state: torch.stack(round_key_value(state.inputs)),
        launch=launch,
        output=key.new_empty(2, *shape),
        peers={"PyTorch": plain} if device == "cuda" else {},
    )


WORK = OpWork(
    sizes=SIZES,
    layers={"": None},
    layer=layer,
    kinds=kinds,
    work=work,
    table=lambda layer, device, wide: tile_table(),
    moves=MOVES,
    decode=frozenset(),
    misfit=lambda table, layer, arch: "",
)
