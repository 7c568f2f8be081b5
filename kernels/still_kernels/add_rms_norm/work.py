"""Sums with their norms for bench and tune: their sizes, calls and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from still_kernels.add_rms_norm.dispatch import add_rms_norm
from still_kernels.add_rms_norm.inputs import Inputs
from still_kernels.add_rms_norm.plan import COLUMNS
from still_kernels.add_rms_norm.settings import MOVES
from still_kernels.add_rms_norm.tiles import tile_table
from still_kernels.dense_matmul.work import SIZES, kinds
from still_kernels.tile import TileTable
from still_kernels.work import Held, Kind, OpWork, Work


@dataclass(frozen=True)
class Layer:
    """Numbers of a token."""

    width: int


def layer(sizes: Mapping[str, int], name: str, context: int) -> Layer:
    """A layer of a model of the given sizes."""
    return Layer(sizes["heads"] * sizes["head_dim"])


def work(layer: Layer, kind: Kind, dtype: torch.dtype, device: str) -> Work:
    """Calls of one kind; sum and norm are one behind the other. Beside them PyTorch's operators."""
    shape = (kind.batch, kind.tokens, layer.width)
    tokens, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))

    def state() -> Held:
        generator = torch.Generator(device).manual_seed(0)
        weight = torch.rand(layer.width, device=device, generator=generator).to(dtype) + 0.5
        return Held(Inputs(tokens, residual, weight), ("norm_weight",))

    def plain(state: Held) -> Tensor:
        total = tokens + residual
        return torch.stack(
            (total, rms_norm(total, (layer.width,), state.inputs.norm_weight, state.inputs.norm_epsilon))
        )

    def launch(state: Held, output: Tensor, table: TileTable) -> None:
        from still_kernels.add_rms_norm.launch import launch_add_rms_norm

        launch_add_rms_norm(state.inputs, *output, table=table)

    return Work(
        float((4 * tokens.numel() + layer.width) * tokens.element_size()),
        5.0 * tokens.numel(),
        state=state,
        reference=plain,
        run=lambda state: torch.stack(add_rms_norm(state.inputs)),
        launch=launch,
        output=tokens.new_empty(2, *shape),
        peers={"PyTorch": plain} if device == "cuda" else {},
    )


WORK = OpWork(
    sizes=SIZES,
    layers={"": None},
    layer=layer,
    kinds=kinds,
    work=work,
    table=lambda layer, device, wide: tile_table(int(layer.width > COLUMNS)),
    moves=MOVES,
    decode=frozenset(),
    misfit=lambda table, layer, arch: "",
)
