"""Choices of tokens for bench and tune: their sizes, calls and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.dense_matmul.work import SIZES, kinds
from still_kernels.greedy_token.dispatch import greedy_token
from still_kernels.greedy_token.inputs import Inputs
from still_kernels.greedy_token.settings import MOVES
from still_kernels.greedy_token.tiles import tile_table
from still_kernels.tile import TileTable
from still_kernels.work import Held, Kind, OpWork, Work


@dataclass(frozen=True)
class Layer:
    """Tokens of the vocabulary."""

    vocabulary: int


def layer(sizes: Mapping[str, int], name: str, context: int) -> Layer:
    """The head of a model of the given sizes."""
    return Layer(sizes["vocabulary"])


def work(layer: Layer, kind: Kind, dtype: torch.dtype, device: str) -> Work:
    """Calls of one kind. Beside them PyTorch's operator."""
    shape = (kind.batch, kind.tokens, layer.vocabulary)

    def state() -> Held:
        generator = torch.Generator(device).manual_seed(0)
        return Held(Inputs(torch.randn(shape, device=device, generator=generator).to(dtype)), ("logits",))

    def plain(state: Held) -> Tensor:
        return state.inputs.logits.argmax(-1).int()

    def launch(state: Held, output: Tensor, table: TileTable) -> None:
        from still_kernels.greedy_token.launch import launch_greedy_token

        launch_greedy_token(state.inputs, output, table=table)

    count = torch.Size(shape).numel()
    return Work(
        float(count * torch.empty((), dtype=dtype).element_size()),
        float(count),
        state=state,
        reference=plain,
        run=lambda state: greedy_token(state.inputs),
        launch=launch,
        output=torch.empty(shape[:2], dtype=torch.int32, device=device),
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
    decode=frozenset(MOVES),
    misfit=lambda table, layer, arch: "",
)
