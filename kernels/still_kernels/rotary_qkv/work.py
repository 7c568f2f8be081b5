"""Rotations for bench and tune: their sizes, calls and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from still_kernels.dense_matmul.work import SIZES, kinds
from still_kernels.rotary_qkv.dispatch import rotary_qkv
from still_kernels.rotary_qkv.inputs import Inputs
from still_kernels.rotary_qkv.naive import rotated
from still_kernels.rotary_qkv.settings import MOVES
from still_kernels.rotary_qkv.tiles import tile_table
from still_kernels.tile import TileTable
from still_kernels.work import Held, Kind, OpWork, Work


@dataclass(frozen=True)
class Layer:
    """Widths of query, key, value and gate, and of a head."""

    widths: tuple[int, int, int, int]
    head_dim: int


def layer(sizes: Mapping[str, int], name: str, context: int) -> Layer:
    """A layer of a model of the given sizes, with a gate or without one."""
    query, key = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    return Layer((query, key, key, query if name == "gated" else 0), sizes["head_dim"])


def work(layer: Layer, kind: Kind, dtype: torch.dtype, device: str) -> Work:
    """Calls of one kind. Beside them PyTorch's operators one by one."""
    rows, total = (kind.batch, kind.tokens), sum(layer.widths)
    numbers = torch.randn(*rows, total, device=device).to(dtype)
    angles = torch.rand(*rows, layer.head_dim, device=device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    gate = layer.widths[3]

    def state() -> Held:
        generator = torch.Generator(device).manual_seed(0)
        bias = torch.randn(gate, device=device, generator=generator).to(dtype) if gate else None
        return Held(Inputs(numbers, cos, sin, *layer.widths, gate_bias=bias), ("gate_bias",))

    def plain(state: Held) -> Tensor:
        query, key, value, last = numbers.split(layer.widths, -1)
        parts = [rotated(query, cos, sin), rotated(key, cos, sin), value]
        if state.inputs.gate_bias is not None:
            parts.append(torch.sigmoid(last + state.inputs.gate_bias))
        return torch.cat(parts, -1)

    def launch(state: Held, output: Tensor, table: TileTable) -> None:
        from still_kernels.rotary_qkv.launch import launch_rotary_qkv

        # One buffer, a part behind the other.
        shapes = [(*rows, width) for width in layer.widths if width]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        parts = (part.view(shape) for part, shape in zip(output.view(-1).split(sizes), shapes, strict=True))
        launch_rotary_qkv(state.inputs, *parts, table=table)

    moved = 2 * numbers.numel() + cos.numel() + sin.numel() + gate
    return Work(
        float(moved * numbers.element_size()),
        3.0 * rows[0] * rows[1] * sum(layer.widths[:2]),
        state=state,
        reference=plain,
        run=lambda state: torch.cat(rotary_qkv(state.inputs), -1),
        launch=launch,
        output=torch.empty_like(numbers),
        peers={"PyTorch": plain} if device == "cuda" else {},
    )


WORK = OpWork(
    sizes=SIZES,
    layers={"plain": None, "gated": None},
    layer=layer,
    kinds=kinds,
    work=work,
    table=lambda layer, device, wide: tile_table(),
    moves=MOVES,
    decode=frozenset(),
    misfit=lambda table, layer, arch: "",
)
