"""The choice of blocks for bench and tune: its layers, calls and settings."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from still_kernels import launcher
from still_kernels.forms import has_kernels
from still_kernels.select_blocks.meaning import Inputs, naive_select_blocks
from still_kernels.select_blocks.plan import tile_table
from still_kernels.tile import Setting, TileTable, pow2
from tools.kernels.ops.attention import Layer, layer
from tools.kernels.settings import one, stages
from tools.kernels.work import Kind, OneTensor, OpWork, Work, filled

MOVES: dict[str, list[Setting]] = {
    "normalize": [*stages(1, 2, 3), *one("BM", 64, 128, 256), *one("BJ", 32, 64), *one("num_warps", 4, 8)],
    "score": [*stages(1, 2, 3), *one("BM", 64, 128, 256), *one("BJ", 32, 64), *one("num_warps", 4, 8)],
    "choose": [*one("BC", 512, 1024, 2048), *one("num_warps", 1, 2, 4, 8), *one("span_tokens", 1024, 2048, 4096)],
    "multiply": [
        *stages(1, 2, 3),
        *one("BJ", 32, 64, 128),
        *one("num_warps", 4, 8),
        *one("few_programs", 132, 264, 528),
    ],
    "score_few": [*one("BJ", 64, 128, 256), *one("num_warps", 2, 4, 8)],
    "choose_few": [*one("BC", 2048, 4096), *one("num_warps", 4, 8, 16)],
}
"""What is tried from the current setting and then from better ones, by kernel."""


def cost(layer: Layer, kind: Kind, stride: int, coarse: int) -> tuple[float, float]:
    """The least that calls move and compute, (bytes, FLOP), with 16-bit activations: sums of keys once; of each token the product
    with every mean before it, fine and coarse."""
    tokens, end = kind.batch * kind.tokens, kind.length + kind.tokens
    sums = kind.batch * -(-end // stride) * layer.kv_heads * layer.head_dim * 4
    activations = tokens * layer.head_dim * 2 * (layer.heads + layer.kv_heads)
    pairs = tokens * (kind.length + end + 1) / 2 * (1 / stride + 1 / coarse)
    return float(sums + activations), 2.0 * layer.heads * layer.head_dim * pairs


def work(layer: Layer, kind: Kind, dtype: torch.dtype, device: str) -> Work:
    """Calls of one kind."""
    generator = torch.Generator(device).manual_seed(0)

    def random(heads: int) -> Tensor:
        shape = (kind.batch, kind.tokens, heads, layer.head_dim)
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    new, past = (torch.full((kind.batch,), n, device=device) for n in (kind.tokens, kind.length))
    inputs = Inputs(random(layer.heads), random(layer.kv_heads), new, past)
    output = torch.empty(kind.batch, kind.tokens, layer.kv_heads, inputs.block_slots, dtype=torch.int32, device=device)

    def state() -> OneTensor:
        rows = -(-layer.rows // inputs.mean_stride)
        shape = (kind.batch, layer.kv_heads, rows, layer.head_dim)
        made = OneTensor(torch.zeros(shape, device=device))
        return filled(made, torch.Generator(device).manual_seed(1)) if kind.length else made

    def launch(state: OneTensor, output: Tensor, table: TileTable | None = None) -> None:
        from still_kernels.select_blocks.call import launch_select_blocks

        launch_select_blocks(inputs, state.state, output, table)

    def run(state: OneTensor) -> Tensor:
        if not has_kernels(inputs.query.device):
            return naive_select_blocks(inputs, state.state)[0]
        found = torch.empty_like(output)
        launch(state, found)
        return found

    return Work(
        *cost(layer, kind, inputs.mean_stride, inputs.lse_stride),
        state=state,
        reference=lambda state: naive_select_blocks(inputs, state.state)[0],
        run=run,
        launch=launch,
        output=output,
    )


def _sizes(sizes: Mapping[str, int], name: str, context: int) -> Layer:
    return layer(sizes, name, context + 1)


def _table(layer: Layer, device: torch.device, wide: bool) -> TileTable:
    return tile_table(launcher.arch_of(device), layer.head_dim, pow2(layer.heads // layer.kv_heads), wide)


WORK = OpWork(
    sizes={"heads": 32, "kv_heads": 2, "head_dim": 128},
    layers={"blocks": None},
    layer=_sizes,
    work=work,
    table=_table,
    moves=MOVES,
    decode=frozenset({"multiply", "score_few", "choose_few"}),
)
