"""still::RotaryQkv: queries and keys rotated, values and gates told apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from still_kernels.common.stateless import StatelessInputs, StatelessVariant, defined, keyed, stateless_op
from still_kernels.op_kernels import HALVES
from still_kernels.plan import Check, Launch, Plan
from still_kernels.rotary_qkv.spec import ROTARY_QKV
from still_kernels.tile import KernelTile, TileTable

if TYPE_CHECKING:
    from torch import Tensor, dtype


COLUMNS = "query_width + key_width + value_width + gate_width"
PLAN = Plan(
    ROTARY_QKV,
    key=keyed(
        gated="gate_width > 0",
        biased="has(gate_bias)",
        apart="has(gate_input)",
        aligned="query_width % 8 == 0 and key_width % 8 == 0 and value_width % 8 == 0 and gate_width % 8 == 0 and D % 16 == 0",
    ),
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
    steps=(Launch("rotary", ("tokens", f"ceil_div({COLUMNS}, column_block)", "1")),),
)


@dataclass(frozen=True)
class Inputs(StatelessInputs, plan=PLAN):
    """Tensors and attributes of one call, of one type, as of the op's spec."""

    input: Tensor
    cos: Tensor
    sin: Tensor
    query_width: int
    key_width: int
    value_width: int
    gate_width: int = 0
    gate_bias: Tensor | None = None
    gate_input: Tensor | None = None


@defined
def naive_rotary_qkv(inputs: Inputs, wide: dtype) -> tuple[Tensor, ...]:
    """Query, key, value and, where there is one, gate, [B, T, width] each."""
    import torch

    def rotated(x: Tensor) -> Tensor:
        """Heads side by side, each rotated by the angles of its token."""
        heads = x.unflatten(2, (-1, inputs.cos.shape[2]))
        first, second = heads.chunk(2, -1)
        return (heads * cos + torch.cat((-second, first), -1) * sin).flatten(2)

    cos, sin = (angles.to(wide)[:, :, None] for angles in (inputs.cos, inputs.sin))
    apart = [] if inputs.gate_input is None else [inputs.gate_input]
    widths = [getattr(inputs, f"{name}_width") for name in ("query", "key", "value", "gate")[: 4 - len(apart)]]
    query, key, value, gate = (x.to(wide) for x in (*inputs.input.split(widths, -1), *apart))
    gate = gate if inputs.gate_bias is None else gate + inputs.gate_bias.to(wide)
    return rotated(query), rotated(key), value, *([gate.sigmoid()] if inputs.gate_width else [])


@dataclass(frozen=True)
class Variant(StatelessVariant):
    """Whether there is a gate, a bias of it, numbers of it beside the input; whether all widths are read and stored 8 at a time."""

    gated: int = 0
    biased: int = 0
    aligned: int = 1
    apart: int = 0


TILES = TileTable({"rotary": KernelTile({"BC": 512}, 2)})
"""For all, as time is that of a launch, or of reading memory: SmolLM2's token in three programs, Llama-3.1-8B's with a gate in twenty."""


OP = stateless_op(
    PLAN,
    Variant,
    [Variant(dtype, gated, gated) for dtype in HALVES for gated in (0, 1)],
    lambda variant, arch: TILES,
    naive_rotary_qkv,
    module="still_kernels.rotary_qkv.kernels",
    covers="the rotation has",
    blocks={"column_block": "rotary.BC"},
    optional={"gate_bias": "biased", "gate": "gated", "gate_input": "apart"},
)
