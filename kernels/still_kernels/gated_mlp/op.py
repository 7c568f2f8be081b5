"""still::GatedMlp: a feed-forward layer with a gate, behind its norm, added to what it reads; sums in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from still_graphs.ops.gated_mlp import GATED_MLP
from still_kernels.common import gemm_plan as gemm
from still_kernels.common import gemm_tiles as blocks
from still_kernels.common.stateless import HALVES, Calls, StatelessInputs, StatelessVariant, stateless_op
from still_kernels.plan import Branch, Launch, Matrix, Plan, Region
from still_kernels.tile import SHARED_BYTES, KernelTile, TileTable, one

if TYPE_CHECKING:
    from torch import Tensor

    from still_kernels.common.calls import Draw


@dataclass(frozen=True)
class Inputs(StatelessInputs):
    """Tokens and weights of one call, of one type.

    input: [B, T, I]; also what the result is added to.
    norm_weight: [I].
    down: [M, I].
    gate_up: [I, 2 * M], the gate's outputs first.
    norm_epsilon: Added to the mean square of a token before its root divides the token.
    """

    SPEC = GATED_MLP
    input: Tensor
    norm_weight: Tensor
    down: Tensor
    gate_up: Tensor
    norm_epsilon: float = 1e-5


def naive_gated_mlp(inputs: Inputs) -> Tensor:
    """input + (silu(gate) * up) @ down [B, T, I], gate and up the halves of norm(input) @ gate_up; products in at least float32.
    ShapeError: A tensor does not fit."""
    import torch
    from torch.nn.functional import silu

    from still_kernels.common.naive import naive_norm

    inputs.check()
    x = inputs.input
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = naive_norm(x, inputs.norm_weight, inputs.norm_epsilon)
    gate, up = (rows.to(wide) @ inputs.gate_up.to(wide)).chunk(2, -1)
    middle = (silu(gate) * up).to(x.dtype)
    return (x.to(wide) + middle.to(wide) @ inputs.down.to(wide)).to(x.dtype)


@dataclass(frozen=True)
class Variant(StatelessVariant):
    """What kernels are compiled for.

    aligned: Whether sizes are multiples of 8, which may be read and stored at once.
    whole: Whether they are multiples of `gemm_plan.INNER`.
    span, gated_span: How many outputs the second product has, and the first (`gemm_plan.SPANS`).
    """

    aligned: int = 1
    whole: int = 1
    span: int = 0
    gated_span: int = 1


PARTIAL, ARRIVALS = gemm.split_regions("I")

PLAN = Plan(
    GATED_MLP,
    key={
        "dtype": "dtype",
        "aligned": "M % 8 == 0 and I % 8 == 0",  # loads and stores of 16 bytes
        "whole": f"M % {gemm.INNER} == 0 and I % {gemm.INNER} == 0",
        "span": gemm.span("I"),  # of the second product
        "gated_span": gemm.span("2 * M"),
        "count_dtype": "'int32'",  # there are no counts
    },
    constants=(
        "gated_outputs",
        "few_outputs",
        "split_outputs",
        "split_inputs",
        "split_programs",
        "some_gated_rows",
        "some_gated_outputs",
        "some_rows",
        "some_outputs",
        "gated_rows",
        "gated_block",
        "row_block",
        "output_block",
        "tma",  # 1: kernels of blocks copy by TMA
    ),
    define={"splits": gemm.splits("I", "M")},
    workspace=(
        Region("rows", "T", ("tokens", "I"), f"not ({gemm.FEW})"),
        Region("middle", "T", (f"max(tokens, {gemm.FEW_ROWS})", "M")),
        PARTIAL,
    ),
    persistent=(ARRIVALS,),
    matrices=(
        Matrix("rows", "tokens", "I"),
        Matrix("gate_up", "I", "2 * M"),
        Matrix("middle", "tokens", "M"),
        Matrix("down", "M", "I"),
    ),
    arguments={"M": "tokens", "N": "M", "K": "I", "epsilon": "norm_epsilon"},
    steps=(
        Branch(
            gemm.FEW,
            (
                Launch("few_gated", (f"ceil_div(tokens, {gemm.GROUP_ROWS})", "ceil_div(M, gated_outputs)", "1")),
                Branch(
                    "splits > 1",
                    (Launch("split_down", gemm.split_grid("I")),),
                    (Launch("few_down", (f"ceil_div(tokens, {gemm.GROUP_ROWS})", "ceil_div(I, few_outputs)", "1")),),
                ),
            ),
            (
                Launch("norm", ("tokens", "1", "1")),
                Branch(
                    gemm.is_some("gated_rows", "gated_block", "M"),
                    (gemm.by_blocks("some_gated", "some_gated_rows", "some_gated_outputs", "M"),),
                    (gemm.by_blocks("many_gated", "gated_rows", "gated_block", "M"),),
                ),
                Branch(
                    gemm.is_some("row_block", "output_block", "I"),
                    (gemm.by_blocks("some_down", "some_rows", "some_outputs", "I"),),
                    (gemm.by_blocks("many_down", "row_block", "output_block", "I"),),
                ),
            ),
        ),
    ),
)
"""Numbers of kernels are M rows, N numbers between and K inputs."""

FEW_GATED = ((16, 64, 4, 6), (16, 64, 4, 6), (32, 128, 8, 4), (64, 64, 8, 4))
MANY_GATED = ((64, 32, 4, 4), (128, 64, 4, 3), (128, 128, 8, 3), (128, 128, 8, 3))
SOME_GATED = ((64, 32, 4, 4), (64, 32, 4, 4), (64, 64, 4, 4), (64, 128, 4, 3))
"""As those of dense weights, with half the outputs: a program computes a gate and a number beside it."""
SOME_GATED_TMA = ((64, 64, 4, 4), (64, 64, 4, 4), (64, 128, 8, 4), (64, 128, 8, 4))
MANY_GATED_TMA = ((64, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 4), (128, 128, 8, 4))
"""The same of kernels that copy by TMA."""


def tile_table(variant: Variant, arch: int) -> TileTable:
    """Block sizes of both products on an architecture (90 for sm_90)."""
    aligned, span, gated_span = variant.aligned, variant.span, variant.gated_span
    roomy = SHARED_BYTES[arch] >= blocks.WIDE_SHARED
    outputs, inner, warps, stages = FEW_GATED[gated_span]
    inner, stages = (inner, stages) if roomy else (64, 3)
    tiles = {
        "norm": KernelTile({"BC": blocks.NORM_COLUMNS}, 4),
        "few_gated": KernelTile({"BN": outputs, "BK": inner, "STAGES": stages}, warps, stages),
        "few_down": blocks.few_tile(span, roomy),
        "split_down": blocks.split_tile(span, roomy, aligned),
    }
    if tma := blocks.by_tma(roomy, aligned, arch):
        tiles |= {
            "some_gated_tma": blocks.tma_tile(SOME_GATED_TMA[gated_span], "rows", "gate_up"),
            "some_down_tma": blocks.tma_tile(blocks.SOME_TMA[span], "middle", "down"),
            "many_gated_tma": blocks.tma_tile(MANY_GATED_TMA[gated_span], "rows", "gate_up"),
            "many_down_tma": blocks.tma_tile(blocks.MANY_TMA[span], "middle", "down"),
        }
    else:
        narrow = gated_span and not (roomy and aligned and arch >= 90)  # sums would not fit into fewer registers
        tiles |= {
            "some_gated": blocks.block_tile(SOME_GATED[gated_span], roomy),
            "some_down": blocks.block_tile(blocks.SOME[span], roomy),
            "many_gated": blocks.block_tile((128, 64, 8, 3) if narrow else MANY_GATED[gated_span], roomy),
            "many_down": blocks.many_tile(span, roomy, aligned, arch),
        }
    return TileTable(tiles, blocks.host_constants(span, tma))


def _draw(sizes: Mapping[str, int], layer: str, draw: Draw) -> Inputs:
    width, middle = sizes["heads"] * sizes["head_dim"], sizes["width"]
    tokens, norm = draw.tokens(width), draw.norm(width)
    return Inputs(tokens, norm, draw.weight(middle, width), draw.weight(width, 2 * middle))


def _plain(inputs: Inputs) -> Tensor:
    from torch.nn.functional import rms_norm, silu

    rows = rms_norm(inputs.input, inputs.norm_weight.shape, inputs.norm_weight, inputs.norm_epsilon)
    gate, up = (rows @ inputs.gate_up).chunk(2, -1)
    return inputs.input + (silu(gate) * up) @ inputs.down


_GATED_MOVES = [*blocks.MANY_MOVES, *one("BN", 32)]
OP = stateless_op(
    PLAN,
    Variant,
    [Variant(dtype, 1, 1, *spans) for dtype in HALVES for spans in ((0, 1), (2, 3))],  # SmolLM2's sizes and Llama's
    tile_table,
    naive_gated_mlp,
    Calls(
        draw=_draw,
        flop=lambda x: 2.0 * x.input[..., 0].numel() * (x.down.numel() + x.gate_up.numel()),
        plain=_plain,
        moves={
            "few_gated": blocks.FEW_MOVES,
            "many_gated": _GATED_MOVES,
            "few_down": blocks.FEW_MOVES,
            "split_down": blocks.SPLIT_MOVES,
            "some_gated": _GATED_MOVES,
            "some_down": blocks.MANY_MOVES,
            "many_down": blocks.MANY_MOVES,
        },
        decode=frozenset({"few_gated", "few_down", "split_down"}),
        instead={name: f"{name}_tma" for name in ("some_gated", "some_down", "many_gated", "many_down")},
        peer="cuBLAS",
    ),
    module="still_kernels.gated_mlp.triton_gated",
    covers="products with dense weights have",
    compiled=lambda variant: {"ALIGNED": variant.aligned, "WHOLE": variant.whole},
    blocks={
        "gated_outputs": "few_gated.BN",
        "some_gated_rows": "some_gated.BM",
        "some_gated_outputs": "some_gated.BN",
        "some_rows": "some_down.BM",
        "some_outputs": "some_down.BN",
        "gated_rows": "many_gated.BM",
        "gated_block": "many_gated.BN",
        "few_outputs": "few_down.BN",
        "row_block": "many_down.BM",
        "output_block": "many_down.BN",
    },
)
