"""Products with weights in blocks for bench and tune: their sizes, calls and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.matmul_nbits.cost import cost
from still_kernels.matmul_nbits.dispatch import matmul_nbits
from still_kernels.matmul_nbits.inputs import WORD_BITS, Inputs
from still_kernels.matmul_nbits.naive import dequantized
from still_kernels.matmul_nbits.plan import SPANS
from still_kernels.matmul_nbits.settings import MOVES
from still_kernels.matmul_nbits.tiles import tile_table
from still_kernels.tile import TileTable
from still_kernels.work import Kind, OpWork, Work

LAYERS = ("query, key, value", "output", "gate and up", "down", "head")
"""Products of a transformer, those of one value as one."""


@dataclass(frozen=True)
class Layer:
    """Sizes of a weight."""

    outputs: int
    inputs: int
    block_size: int
    bits: int
    zero_points: bool


@dataclass(frozen=True)
class Held:
    """A weight, which takes the place of a state: a step must not find its own in the cache.

    dense: The same as numbers, [O, I].
    """

    inputs: Inputs
    dense: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors, by name."""
        return {name: x for name, x in vars(self.inputs).items() if name != "input" and isinstance(x, Tensor)}


def layer(sizes: Mapping[str, int], name: str, context: int) -> Layer:
    """A product of a model of the given sizes; 4 bits have zero points."""
    hidden = sizes["heads"] * sizes["head_dim"]
    outputs, inputs = {
        "query, key, value": (hidden + 2 * sizes["kv_heads"] * sizes["head_dim"], hidden),
        "output": (hidden, hidden),
        "gate and up": (2 * sizes["width"], hidden),
        "down": (hidden, sizes["width"]),
        "head": (sizes["vocabulary"], hidden),
    }[name]
    return Layer(outputs, inputs, sizes["block_size"], sizes["bits"], sizes["bits"] == 4)


def kinds(context: int, batches: Sequence[int]) -> list[Kind]:
    """The rows of a prefill, and of steps."""
    return [Kind("prefill", 1, context, 0), *(Kind("decode", batch, 1, context - 1) for batch in batches)]


def work(layer: Layer, kind: Kind, dtype: torch.dtype, device: str) -> Work:
    """Calls of one kind. Beside them cuBLAS with the weight in the type of the activations."""
    tokens = torch.randn(kind.batch, kind.tokens, layer.inputs, device=device).to(dtype)
    blocks = layer.inputs // layer.block_size

    def state() -> Held:
        generator = torch.Generator(device).manual_seed(0)

        def words(count: int) -> Tensor:
            shape = (layer.outputs, count)
            return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=device, generator=generator)

        codes = words(layer.inputs * layer.bits // WORD_BITS)
        scales = torch.rand(layer.outputs, blocks, device=device, generator=generator).to(dtype) / 64
        zero_points = words(-(-blocks * layer.bits // WORD_BITS)) if layer.zero_points else None
        inputs = Inputs(tokens, codes, scales, zero_points, layer.bits, layer.block_size)
        return Held(inputs, dequantized(inputs))

    def launch(state: Held, output: Tensor, table: TileTable) -> None:
        from still_kernels.matmul_nbits.launch import launch_matmul_nbits

        launch_matmul_nbits(state.inputs, output, table=table)

    def dense(state: Held) -> Tensor:
        return tokens @ state.dense.T

    return Work(
        *cost(layer.outputs, layer.inputs, layer.bits, layer.block_size, layer.zero_points, kind.batch * kind.tokens),
        state=state,
        reference=dense,
        run=lambda state: matmul_nbits(state.inputs),
        launch=launch,
        output=tokens.new_empty(kind.batch, kind.tokens, layer.outputs),
        peers={"cuBLAS, 16 bits": dense} if device == "cuda" else {},
    )


def _table(layer: Layer, device: torch.device, wide: bool) -> TileTable:
    from still_kernels.launcher import arch_of

    return tile_table(
        layer.bits, int(layer.outputs % 8 == 0), sum(layer.outputs > most for most in SPANS), arch_of(device)
    )


WORK = OpWork(
    sizes={
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "width": 14336,
        "vocabulary": 128256,
        "bits": 4,
        "block_size": 32,
    },
    layers=dict.fromkeys(LAYERS),
    layer=layer,
    kinds=kinds,
    work=work,
    table=_table,
    moves=MOVES,
    decode=frozenset({"few"}),
    misfit=lambda table, layer, arch: "",
)
