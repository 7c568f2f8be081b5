"""Products with dense weights for bench and tune: their sizes, calls and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.dense_matmul.dispatch import dense_matmul
from still_kernels.dense_matmul.inputs import Inputs
from still_kernels.dense_matmul.plan import SPANS
from still_kernels.dense_matmul.settings import MOVES
from still_kernels.dense_matmul.tiles import tile_table
from still_kernels.tile import TileTable
from still_kernels.work import Held, Kind, OpWork, Work

SIZES = {"heads": 32, "kv_heads": 8, "head_dim": 128, "width": 14336, "vocabulary": 128256}


@dataclass(frozen=True)
class Layer:
    """Sizes of a weight, and what is around the product."""

    outputs: int
    inputs: int
    normed: bool = False
    residual: bool = False
    turned: bool = False


LAYERS = {
    "query, key, value": lambda s, hidden: Layer(hidden + 2 * s["kv_heads"] * s["head_dim"], hidden, normed=True),
    "output": lambda s, hidden: Layer(hidden, hidden, residual=True),
    "head": lambda s, hidden: Layer(s["vocabulary"], hidden, turned=True),
}
"""Products of a transformer beside its feed-forward layers, those of one value as one."""


def layer(sizes: Mapping[str, int], name: str, context: int) -> Layer:
    """A product of a model of the given sizes."""
    return LAYERS[name](sizes, sizes["heads"] * sizes["head_dim"])


def kinds(context: int, batches: Sequence[int]) -> list[Kind]:
    """The rows of a prefill, and of steps."""
    return [Kind("prefill", 1, context, 0), *(Kind("decode", batch, 1, context - 1) for batch in batches)]


def drawn(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Random weights whose products are of the size of what they multiply."""
    return (torch.randn(shape, device=like.device, generator=generator) / shape[0] ** 0.5).to(like.dtype)


def work(layer: Layer, kind: Kind, dtype: torch.dtype, device: str) -> Work:
    """Calls of one kind. Beside them cuBLAS."""
    tokens = torch.randn(kind.batch, kind.tokens, layer.inputs, device=device).to(dtype)
    residual = torch.randn(kind.batch, kind.tokens, layer.outputs, device=device).to(dtype) if layer.residual else None

    def state() -> Held:
        generator = torch.Generator(device).manual_seed(0)
        weight = drawn((layer.inputs, layer.outputs), tokens, generator)
        norm = torch.rand(layer.inputs, device=device, generator=generator).to(dtype) + 0.5 if layer.normed else None
        kept, turned = (None, weight.T.contiguous()) if layer.turned else (weight, None)
        return Held(Inputs(tokens, kept, turned, norm, residual), ("weight", "turned_weight", "norm_weight"))

    def plain(state: Held) -> Tensor:
        given = state.inputs
        x = tokens
        if given.norm_weight is not None:
            x = torch.nn.functional.rms_norm(tokens, (layer.inputs,), given.norm_weight, given.norm_epsilon)
        product = x @ (given.turned_weight.T if given.weight is None else given.weight)  # type: ignore[union-attr]
        return product if residual is None else product + residual

    def launch(state: Held, output: Tensor, table: TileTable) -> None:
        from still_kernels.dense_matmul.launch import launch_dense_matmul

        launch_dense_matmul(state.inputs, output, table=table)

    rows = kind.batch * kind.tokens
    moved = layer.inputs * layer.outputs + rows * (layer.inputs + layer.outputs * (2 if layer.residual else 1))
    return Work(
        float(moved * tokens.element_size()),
        2.0 * rows * layer.outputs * layer.inputs,
        state=state,
        reference=plain,
        run=lambda state: dense_matmul(state.inputs),
        launch=launch,
        output=tokens.new_empty(kind.batch, kind.tokens, layer.outputs),
        peers={"cuBLAS": plain} if device == "cuda" else {},
    )


def span_of(outputs: int) -> int:
    """The span of a number of outputs."""
    return sum(outputs > most for most in SPANS)


def _table(layer: Layer, device: torch.device, wide: bool) -> TileTable:
    from still_kernels.launcher import arch_of

    aligned = int(layer.outputs % 8 == 0 and layer.inputs % 8 == 0)
    return tile_table(aligned, span_of(layer.outputs), arch_of(device), int(layer.normed), int(layer.turned))


WORK = OpWork(
    sizes=SIZES,
    layers=dict.fromkeys(LAYERS),
    layer=layer,
    kinds=kinds,
    work=work,
    table=_table,
    moves=MOVES,
    decode=frozenset({"few", "split"}),
    instead={name: f"{name}_tma" for name in ("some", "many")},
    misfit=lambda table, layer, arch: "",
)
