"""Attention to chosen blocks for bench and tune: its layers, calls and settings."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from still_kernels import launcher
from still_kernels.attention.meaning import AttentionState
from still_kernels.block_attention.meaning import Inputs, block_attention
from still_kernels.block_attention.plan import tile_table
from still_kernels.forms import has_kernels
from still_kernels.tile import Setting, TileTable
from tools.kernels.ops.attention import Layer, kept, layer
from tools.kernels.settings import one, stages
from tools.kernels.work import Kind, OpWork, Work

SLOTS, BLOCK = 128, 64
"""Blocks that a token reads at most, and tokens of a block: MiniCPM-SALA's."""

MOVES: dict[str, list[Setting]] = {
    "attend": [*stages(2, 3, 4), {"BM": 128, "num_warps": 8}, *one("BN", 32, 64), *one("num_warps", 4, 8)],
    "unite": [*one("BC", 256, 512, 1024), *one("num_warps", 2, 4, 8)],
    "decode": [
        *stages(2, 3, 4),
        *one("BN", 32, 64),
        *one("num_warps", 2, 4, 8),
        *one("decode_programs", 132, 264, 528),
    ],
}
"""What is tried from the current setting and then from better ones, by kernel."""


def chosen_by_chance(kind: Kind, kv_heads: int, device: str, generator: torch.Generator) -> Tensor:
    """Blocks int32 [B, T, HK, slots], ascending, -1 behind them: the token's own, and others before it at random."""
    places = kind.length + torch.arange(kind.tokens, device=device)
    own = places[:, None, None] // BLOCK
    number = torch.arange(-(-(kind.length + kind.tokens) // BLOCK), device=device)
    shape = (kind.batch, kind.tokens, kv_heads, len(number))
    scores = torch.rand(shape, device=device, generator=generator)
    scores = scores.masked_fill(number == own, 2.0).masked_fill(number > own, -1.0)
    best = scores.topk(min(SLOTS, len(number)), -1)
    blocks = torch.where(best.values >= 0, best.indices, len(number)).sort(-1).values
    blocks = torch.where(blocks < len(number), blocks, -1)
    return torch.nn.functional.pad(blocks, (0, SLOTS - blocks.shape[-1]), value=-1).to(torch.int32)


def cost(layer: Layer, kind: Kind) -> tuple[float, float]:
    """The least that calls move and compute, (bytes, FLOP), with 16-bit activations: a step reads the chosen rows once."""
    places = range(kind.length, kind.length + kind.tokens)
    rows = kind.batch * sum(min(place + 1, (SLOTS - 1) * BLOCK + place % BLOCK + 1) for place in places)
    flop = 4.0 * layer.heads * layer.head_dim * rows
    tokens = kind.batch * kind.tokens
    activations = tokens * layer.head_dim * 2 * (2 * layer.heads + 4 * layer.kv_heads)
    read = rows * layer.kv_heads * layer.head_dim * 4 if kind.tokens == 1 else 0
    return float(activations + read), flop


def work(layer: Layer, kind: Kind, dtype: torch.dtype, device: str) -> Work:
    """Calls of one kind."""
    generator = torch.Generator(device).manual_seed(0)

    def random(heads: int) -> Tensor:
        shape = (kind.batch, kind.tokens, heads, layer.head_dim)
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    new = torch.full((kind.batch,), kind.tokens, device=device)
    blocks = chosen_by_chance(kind, layer.kv_heads, device, generator)
    inputs = Inputs(random(layer.heads), random(layer.kv_heads), random(layer.kv_heads), new, blocks, BLOCK)

    def launch(state: AttentionState, output: Tensor, table: TileTable | None = None) -> None:
        from still_kernels.block_attention.call import launch_block_attention

        launch_block_attention(inputs, state, output, table)

    def run(state: AttentionState) -> Tensor:
        if not has_kernels(inputs.query.device):
            return block_attention(inputs, state, in_place=True)[0]
        output = torch.empty_like(inputs.query)
        launch(state, output)
        return output

    return Work(
        *cost(layer, kind),
        state=lambda: kept(layer, kind, dtype, device),
        reference=lambda state: block_attention(inputs, state)[0],
        run=run,
        launch=launch,
        output=inputs.query,
    )


def _sizes(sizes: Mapping[str, int], name: str, context: int) -> Layer:
    return layer(sizes, name, context + BLOCK)


WORK = OpWork(
    sizes={"heads": 32, "kv_heads": 2, "head_dim": 128},
    layers={"blocks": None},
    layer=_sizes,
    work=work,
    table=lambda layer, device, wide: tile_table(launcher.arch_of(device), layer.head_dim, BLOCK, wide),
    moves=MOVES,
    decode=frozenset({"decode"}),
)
