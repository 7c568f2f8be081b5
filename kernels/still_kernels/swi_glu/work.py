"""Gates of feed-forward layers for bench and tune: their sizes, calls and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from still_kernels.dense_matmul.work import SIZES, kinds
from still_kernels.swi_glu.dispatch import swi_glu
from still_kernels.swi_glu.inputs import Inputs
from still_kernels.swi_glu.settings import MOVES
from still_kernels.swi_glu.tiles import tile_table
from still_kernels.tile import TileTable
from still_kernels.work import Held, Kind, OpWork, Work


@dataclass(frozen=True)
class Layer:
    """Numbers of a token in each half."""

    width: int


def layer(sizes: Mapping[str, int], name: str, context: int) -> Layer:
    """A layer of a model of the given sizes."""
    return Layer(sizes["width"])


def work(layer: Layer, kind: Kind, dtype: torch.dtype, device: str) -> Work:
    """Calls of one kind. Beside them PyTorch's operators."""
    numbers = torch.randn(kind.batch, kind.tokens, 2 * layer.width, device=device).to(dtype)
    output = torch.empty_like(numbers[..., : layer.width], memory_format=torch.contiguous_format)

    def plain(state: Held) -> Tensor:
        gate, up = numbers.chunk(2, -1)
        return silu(gate) * up

    def launch(state: Held, output: Tensor, table: TileTable) -> None:
        from still_kernels.swi_glu.launch import launch_swi_glu

        launch_swi_glu(state.inputs, output, table=table)

    return Work(
        float((numbers.numel() + output.numel()) * numbers.element_size()),
        4.0 * output.numel(),
        state=lambda: Held(Inputs(numbers, layer.width)),
        reference=plain,
        run=lambda state: swi_glu(state.inputs),
        launch=launch,
        output=output,
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
