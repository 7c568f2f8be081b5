"""still::Attention for bench and tune: its layers, calls, least costs and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels import launcher
from still_kernels.attention.call import attention
from still_kernels.attention.meaning import AttentionState, Inputs, blocked_attention
from still_kernels.attention.plan import tile_table
from still_kernels.tile import Setting, TileTable
from tools.kernels.settings import one, stages
from tools.kernels.work import Kind, OpWork, Work, filled

MOVES: dict[str, list[Setting]] = {
    "attend": [
        *stages(2, 3, 4),
        *one("BM", 32, 64, 128),
        *one("BN", 32, 64, 128),
        {"BM": 128, "num_warps": 8},
        {"BM": 128, "BN": 128, "num_warps": 8, "STAGES": 2, "num_stages": 2},
        *one("num_warps", 2, 4, 8),
        *one("max_registers", None, 128, 168),
    ],
    "decode": [
        *stages(2, 3, 4, 6),
        *one("BN", 16, 32, 64, 128),
        *one("BS", 16, 32, 64),
        *one("num_warps", 2, 4, 8),
        *one("max_registers", None, 96, 128, 168),
        *one("decode_programs", 132, 264, 528),
    ],
}
"""What is tried from the current setting and then from better ones, by kernel."""


def misfit(table: TileTable) -> str:
    """Why the block sizes of a table do not go together, or nothing: tokens of earlier blocks are read BN at a time."""
    attend = table.kernels()["attend"].constants
    return "" if attend["BM"] % attend["BN"] == 0 else "BN of attend divides its BM"


def prefill_cost(heads: int, kv_heads: int, dim: int, tokens: int) -> tuple[float, float]:
    """Of one empty sequence: activations once, keys and values written to the cache; half of all pairs, as key and as value."""
    return tokens * dim * 2 * (2 * heads + 4 * kv_heads), 2.0 * heads * dim * tokens * (tokens + 1)


def decode_cost(heads: int, kv_heads: int, dim: int, context: int, batch: int) -> tuple[float, float]:
    """Of one decode step: the filled rows of keys and values are read once."""
    return batch * context * kv_heads * dim * 4, 4.0 * batch * heads * dim * context


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
        from still_kernels.attention.call import launch_attention

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
    return tile_table(launcher.arch_of(device), layer.head_dim, wide)


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
