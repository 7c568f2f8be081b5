"""still::GatedMlp: a feed-forward layer with a gate, behind its norm, added to what it reads; sums in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from still_kernels.common import gemm_plan as gemm
from still_kernels.common import gemm_tiles as blocks
from still_kernels.common.stateless import StatelessInputs, StatelessVariant, defined, keyed, stateless_op
from still_kernels.gated_mlp.spec import GATED_MLP
from still_kernels.op_kernels import HALVES
from still_kernels.plan import Branch, Plan, Region
from still_kernels.tile import TileTable

if TYPE_CHECKING:
    from torch import Tensor, dtype


_GATED_BLOCKS = "gated_outputs", ("some_gated_rows", "some_gated_outputs"), ("gated_rows", "gated_block")
GATED = gemm.Gemm("I", "M", "rows", "gate_up", "2 * M", "_gated", *_GATED_BLOCKS)
DOWN = gemm.Gemm("M", "I", "middle", "down", suffix="_down")
PARTIAL, ARRIVALS = gemm.split_regions("I")

PLAN = Plan(
    GATED_MLP,
    key=keyed(
        aligned="M % 8 == 0 and I % 8 == 0",  # loads and stores of 16 bytes
        whole=f"M % {gemm.INNER} == 0 and I % {gemm.INNER} == 0",
        span=gemm.span("I"),
        gated_span=gemm.span("2 * M"),
    ),
    constants=(*GATED.constants, *DOWN.constants, *gemm.HOST),
    define={"splits": gemm.splits("I", "M")},
    workspace=(
        Region("rows", "T", ("tokens", "I"), f"not ({gemm.FEW})"),
        Region("middle", "T", (f"max(tokens, {gemm.FEW_ROWS})", "M")),
        PARTIAL,
    ),
    persistent=(ARRIVALS,),
    matrices=(*GATED.matrices, *DOWN.matrices),
    arguments={"M": "tokens", "N": "M", "K": "I", "epsilon": "norm_epsilon"},  # rows, numbers between, inputs
    steps=(Branch(gemm.FEW, (GATED.few_step(), DOWN.split_step()), (gemm.NORM, GATED.many_step(), DOWN.many_step())),),
)


@dataclass(frozen=True)
class Inputs(StatelessInputs, plan=PLAN):
    """Tensors and attributes of one call, of one type, as of the op's spec."""

    input: Tensor
    norm_weight: Tensor
    down: Tensor
    gate_up: Tensor
    norm_epsilon: float = 1e-5


@defined
def naive_gated_mlp(inputs: Inputs, wide: dtype) -> Tensor:
    """input + (silu(gate) * up) @ down [B, T, I], gate and up the halves of norm(input) @ gate_up."""
    from still_kernels.common.naive import naive_gate, naive_norm

    x = inputs.input
    rows = naive_norm(x, inputs.norm_weight, inputs.norm_epsilon, wide).to(wide)
    middle = naive_gate(rows @ inputs.gate_up.to(wide)).to(x.dtype)
    return x.to(wide) + middle.to(wide) @ inputs.down.to(wide)


@dataclass(frozen=True)
class Variant(StatelessVariant):
    """aligned: Whether sizes are multiples of 8, which may be read and stored at once; whole: of `gemm_plan.INNER`.
    span, gated_span: How many outputs the second GEMM has, and the first (`gemm_plan.SPANS`)."""

    aligned: int = 1
    whole: int = 1
    span: int = 0
    gated_span: int = 1


def tile_table(variant: Variant, arch: int) -> TileTable:
    """Block sizes of both GEMMs on an architecture (90 for sm_90)."""
    aligned, span, tma = variant.aligned, variant.span, blocks.by_tma(variant.aligned, arch)
    tiles = blocks.GATED.tiles(GATED, variant.gated_span, aligned, arch, tma)
    tiles |= blocks.DENSE.tiles(DOWN, span, aligned, arch, tma)
    tiles |= {"norm": blocks.NORM, "split_down": blocks.split_tile(span, aligned, arch)}
    return TileTable(tiles, blocks.host_constants(span, tma))


OP = stateless_op(
    PLAN,
    Variant,
    [Variant(dtype, 1, 1, *spans) for dtype in HALVES for spans in ((0, 1), (2, 3))],  # SmolLM2's sizes and Llama's
    tile_table,
    naive_gated_mlp,
    module="still_kernels.gated_mlp.kernels",
    covers="GEMMs with dense weights have",
    blocks=GATED.constants | DOWN.constants,
)
