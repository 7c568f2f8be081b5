"""still::CausalConv for bench and tune: its layers, calls, least costs and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.causal_conv.call import causal_conv
from still_kernels.causal_conv.meaning import Inputs, empty_state, whole_causal_conv
from still_kernels.causal_conv.plan import tile_table
from still_kernels.tile import Setting, TileTable
from tools.kernels.settings import one
from tools.kernels.work import Kind, OneTensor, OpWork, Work

MOVES: dict[str, list[Setting]] = {
    "conv": [*one("BT", 8, 16, 32, 64), *one("BC", 64, 128, 256), *one("num_warps", 2, 4, 8)],
    "commit": [*one("BC", 64, 128, 256)],
    "step": [*one("BC", 32, 64, 128, 256), *one("num_warps", 1, 2, 4)],
}
"""What is tried from the current setting and then from better ones, by kernel."""


def cost(channels: int, taps: int, tokens: int, batch: int) -> tuple[float, float]:
    """Of `batch` sequences: tokens in and out, taps, the state read and written once."""
    moved = batch * channels * (2 * tokens + 2 * (taps - 1)) + channels * taps
    return 2 * moved, 2.0 * batch * tokens * channels * taps


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer."""

    channels: int
    taps: int
    activation: str


def layer(sizes: Mapping[str, int], name: str, context: int) -> Layer:
    """The convolution in front of linear attention: queries, keys and values side by side."""
    return Layer((sizes["heads"] + 2 * sizes["kv_heads"]) * sizes["head_dim"], sizes["taps"], name)


def work(layer: Layer, kind: Kind, dtype: torch.dtype, device: str) -> Work:
    """Calls of one kind."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    new = torch.full((kind.batch,), kind.tokens, device=device)
    tokens, weight = random(kind.batch, kind.tokens, layer.channels), random(layer.channels, 1, layer.taps)
    inputs = Inputs(tokens, weight, None, new, layer.activation)

    def state() -> OneTensor:
        return OneTensor(empty_state(kind.batch, layer.channels, layer.taps, dtype, device))

    def launch(state: OneTensor, output: Tensor, table: TileTable) -> None:
        from still_kernels.causal_conv.call import launch_causal_conv

        launch_causal_conv(inputs, state.state, output, table=table)

    return Work(
        *cost(layer.channels, layer.taps, kind.tokens, kind.batch),
        state=state,
        reference=lambda state: whole_causal_conv(inputs, state.state)[0],
        run=lambda state: causal_conv(inputs, state.state, in_place=True)[0],
        launch=launch,
        output=tokens,
    )


def _table(layer: Layer, device: torch.device, wide: bool) -> TileTable:
    from still_kernels.launcher import arch_of

    return tile_table(arch_of(device))


WORK = OpWork(
    sizes={"heads": 32, "kv_heads": 16, "head_dim": 128, "taps": 4},
    layers={"silu": None, "none": None},
    layer=layer,
    work=work,
    table=_table,
    moves=MOVES,
    decode=frozenset({"step"}),
)
