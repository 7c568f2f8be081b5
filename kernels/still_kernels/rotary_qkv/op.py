"""still::RotaryQkv: queries and keys rotated, values and gates told apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from still_graphs.errors import ShapeError
from still_graphs.ops.rotary_qkv import ROTARY_QKV
from still_kernels.common.stateless import HALVES, Calls, StatelessInputs, StatelessVariant, stateless_op
from still_kernels.plan import Check, Launch, Plan
from still_kernels.tile import KernelTile, TileTable, one

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from still_kernels.common.calls import Draw


@dataclass(frozen=True)
class Inputs(StatelessInputs):
    """Numbers of tokens and angles of one call, of one type.

    input: [B, T, F], those of query, key, value and gate side by side.
    cos, sin: [B, T, D], both halves of D alike or not.
    query_width, key_width: Multiples of D.
    value_width, gate_width: What is left of F; a gate_width of 0: there is no gate.
    gate_bias: [gate_width]; None: 0.
    gate_input: [B, T, gate_width], which are not among the F then; None: they are.
    """

    SPEC = ROTARY_QKV
    input: Tensor
    cos: Tensor
    sin: Tensor
    query_width: int
    key_width: int
    value_width: int
    gate_width: int = 0
    gate_bias: Tensor | None = None
    gate_input: Tensor | None = None

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Of the four parts."""
        return self.query_width, self.key_width, self.value_width, self.gate_width

    def check(self) -> None:
        """Raise ShapeError naming what does not fit."""
        own = sum(self.widths if self.gate_input is None else self.widths[:3])
        self.check_shapes(F=own)
        size = self.cos.shape[2]
        if size % 2 or self.query_width % size or self.key_width % size:
            raise ShapeError(
                f"query_width={self.query_width}, key_width={self.key_width}: expected heads of an even size, cos has {size}."
            )
        beside = self.gate_bias is not None or self.gate_input is not None
        if min(self.widths[:3]) < 1 or self.gate_width < 0 or (beside and not self.gate_width):
            raise ShapeError(
                f"widths {list(self.widths)}: expected query, key and value, and a gate for a gate_bias or gate_input."
            )


def _parts(inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Query, key, value and, where there is one, gate, computed in a type."""
    import torch

    def rotated(x: Tensor) -> Tensor:
        heads = x.unflatten(2, (-1, cos.shape[3]))
        first, second = heads.chunk(2, -1)
        return (heads * cos + torch.cat((-second, first), -1) * sin).flatten(2)

    whole = inputs.input if inputs.gate_input is None else torch.cat((inputs.input, inputs.gate_input), -1)
    query, key, value, gate = whole.to(dtype).split(inputs.widths, -1)
    cos, sin = (angles.to(dtype)[:, :, None] for angles in (inputs.cos, inputs.sin))
    results = [rotated(query), rotated(key), value]
    if inputs.gate_width:
        results.append(torch.sigmoid(gate if inputs.gate_bias is None else gate + inputs.gate_bias.to(dtype)))
    return tuple(results)


def naive_rotary_qkv(inputs: Inputs) -> tuple[Tensor, ...]:
    """Query, key, value and, where there is one, gate, [B, T, width] each, dtype of input, computed in at least float32. ShapeError: A
    tensor or width does not fit."""
    import torch

    inputs.check()
    dtype = inputs.input.dtype
    return tuple(x.to(dtype) for x in _parts(inputs, torch.promote_types(dtype, torch.float32)))


@dataclass(frozen=True)
class Variant(StatelessVariant):
    """What the kernel is compiled for.

    gated, biased, apart: Whether there is a gate, a bias of it, and numbers of it beside the input.
    aligned: Whether widths and halves of heads are multiples of 8, which may be read and stored at once.
    """

    gated: int = 0
    biased: int = 0
    aligned: int = 1
    apart: int = 0


PLAN = Plan(
    ROTARY_QKV,
    key={
        "dtype": "dtype",
        "gated": "gate_width > 0",
        "biased": "has(gate_bias)",
        "apart": "has(gate_input)",
        "aligned": "query_width % 8 == 0 and key_width % 8 == 0 and value_width % 8 == 0 and gate_width % 8 == 0 and D % 16 == 0",
        "count_dtype": "'int32'",  # there are no counts
    },
    constants=("column_block",),
    checks=(
        Check(
            "F == query_width + key_width + value_width + (0 if has(gate_input) else gate_width)",
            "widths {query_width}, {key_width}, {value_width} and {gate_width} are not the input's {F} together.",
        ),
        Check(
            "D % 2 == 0 and query_width % D == 0 and key_width % D == 0",
            "query_width={query_width}, key_width={key_width} are no heads of an even D={D}.",
        ),
        Check(
            "query_width > 0 and key_width > 0 and value_width > 0 and gate_width >= 0 "
            "and (gate_width > 0 or not (has(gate_bias) or has(gate_input)))",
            "query, key and value must have numbers, and a gate_bias or gate_input a gate.",
        ),
    ),
    arguments={"Q": "query_width", "K": "key_width", "V": "value_width", "G": "gate_width", "D": "D"},
    steps=(
        Launch("rotary", ("tokens", "ceil_div(query_width + key_width + value_width + gate_width, column_block)", "1")),
    ),
)

TILES = TileTable({"rotary": KernelTile({"BC": 512}, 2)})
"""One for every variant and architecture, as time is that of a launch, or of reading memory: a token of SmolLM2 in three programs,
Llama-3.1-8B's with a gate in twenty."""


def _draw(sizes: Mapping[str, int], layer: str, draw: Draw) -> Inputs:
    dim = sizes["head_dim"]
    query, key = sizes["heads"] * dim, sizes["kv_heads"] * dim
    gate = query if layer == "gated" else 0
    numbers, angles = draw.tokens(query + 2 * key + gate), draw.tokens(dim)
    bias = draw.weight(gate) if gate else None
    return Inputs(numbers, angles.cos(), angles.sin(), query, key, key, gate, bias)


OP = stateless_op(
    PLAN,
    Variant,
    [Variant(dtype, gated, gated) for dtype, gated in product(HALVES, (0, 1))],
    lambda variant, arch: TILES,
    naive_rotary_qkv,
    Calls(
        draw=_draw,
        flop=lambda inputs: 3.0 * inputs.input[..., 0].numel() * sum(inputs.widths[:2]),
        plain=lambda inputs: _parts(inputs, inputs.input.dtype),
        moves={"rotary": [*one("BC", 128, 256, 512, 1024, 2048), *one("num_warps", 1, 2, 4, 8)]},
        layers=("plain", "gated"),
    ),
    module="still_kernels.rotary_qkv.triton_rotary",
    covers="the rotation has",
    blocks={"column_block": "rotary.BC"},
    optional={"gate_bias": "biased", "gate": "gated", "gate_input": "apart"},
)
