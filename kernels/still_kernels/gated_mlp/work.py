"""Feed-forward layers for bench and tune: their sizes, calls and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from still_kernels.dense_matmul.work import SIZES, drawn, kinds, span_of
from still_kernels.gated_mlp.dispatch import gated_mlp
from still_kernels.gated_mlp.inputs import Inputs
from still_kernels.gated_mlp.settings import MOVES
from still_kernels.gated_mlp.tiles import tile_table
from still_kernels.tile import TileTable
from still_kernels.work import Held, Kind, OpWork, Work


@dataclass(frozen=True)
class Layer:
    """Numbers of a token, and between the products."""

    width: int
    middle: int


def layer(sizes: Mapping[str, int], name: str, context: int) -> Layer:
    """The layer of a model of the given sizes."""
    return Layer(sizes["heads"] * sizes["head_dim"], sizes["width"])


def work(layer: Layer, kind: Kind, dtype: torch.dtype, device: str) -> Work:
    """Calls of one kind. Beside them cuBLAS and PyTorch's elementwise operators."""
    tokens = torch.randn(kind.batch, kind.tokens, layer.width, device=device).to(dtype)

    def state() -> Held:
        generator = torch.Generator(device).manual_seed(0)
        norm = torch.rand(layer.width, device=device, generator=generator).to(dtype) + 0.5
        down = drawn((layer.middle, layer.width), tokens, generator)
        gate_up = drawn((layer.width, 2 * layer.middle), tokens, generator)
        return Held(Inputs(tokens, norm, down, gate_up), ("norm_weight", "down", "gate_up"))

    def plain(state: Held) -> Tensor:
        given = state.inputs
        gate, up = (rms_norm(tokens, (layer.width,), given.norm_weight, given.norm_epsilon) @ given.gate_up).chunk(
            2, -1
        )
        return tokens + (silu(gate) * up) @ given.down

    def launch(state: Held, output: Tensor, table: TileTable) -> None:
        from still_kernels.gated_mlp.launch import launch_gated_mlp

        launch_gated_mlp(state.inputs, output, table=table)

    rows, weights = kind.batch * kind.tokens, 3 * layer.width * layer.middle
    return Work(
        float((weights + 2 * rows * layer.width) * tokens.element_size()),
        2.0 * rows * weights,
        state=state,
        reference=plain,
        run=lambda state: gated_mlp(state.inputs),
        launch=launch,
        output=torch.empty_like(tokens),
        peers={"cuBLAS": plain} if device == "cuda" else {},
    )


def _table(layer: Layer, device: torch.device, wide: bool) -> TileTable:
    from still_kernels.launcher import arch_of

    aligned = int(layer.width % 8 == 0 and layer.middle % 8 == 0)
    return tile_table(aligned, span_of(layer.width), span_of(2 * layer.middle), arch_of(device))


WORK = OpWork(
    sizes=SIZES,
    layers={"": None},
    layer=layer,
    kinds=kinds,
    work=work,
    table=_table,
    moves=MOVES,
    decode=frozenset({"few_gated", "few_down", "split_down"}),
    instead={name: f"{name}_tma" for name in ("some_gated", "some_down", "many_gated", "many_down")},
    misfit=lambda table, layer, arch: "",
)
