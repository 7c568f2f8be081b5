"""still::DenseMatMul: tokens times a weight of 16-bit numbers, with a norm in front and a sum behind; sums in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from still_graphs.errors import ShapeError
from still_graphs.ops.dense_matmul import DENSE_MATMUL
from still_kernels.common import gemm_plan as gemm
from still_kernels.common import gemm_tiles as blocks
from still_kernels.common.stateless import HALVES, Calls, StatelessInputs, StatelessVariant, stateless_op
from still_kernels.plan import Alias, Branch, Check, Launch, Matrix, Plan, Region
from still_kernels.tile import SHARED_BYTES, KernelTile, TileTable

if TYPE_CHECKING:
    from torch import Tensor

    from still_kernels.common.calls import Draw


@dataclass(frozen=True)
class Inputs(StatelessInputs):
    """Tokens and weight of one call, of one type.

    input: [B, T, I].
    weight: [I, O]; None: `turned_weight` is given.
    turned_weight: The same as [O, I].
    norm_weight: [I], of the norm that tokens pass first; None: they do not.
    residual: [B, T, O], added to the product.
    norm_epsilon: Added to the mean square of a token before its root divides the token.
    """

    SPEC = DENSE_MATMUL
    input: Tensor
    weight: Tensor | None = None
    turned_weight: Tensor | None = None
    norm_weight: Tensor | None = None
    residual: Tensor | None = None
    norm_epsilon: float = 1e-5

    def check(self) -> None:
        """Raise ShapeError naming the tensor that does not fit."""
        if (self.weight is None) == (self.turned_weight is None):
            raise ShapeError("weight, turned_weight: one of them is wanted.")
        super().check()


def naive_dense_matmul(inputs: Inputs) -> Tensor:
    """Tokens, normed where there is norm_weight, times the weight, in at least float32, plus the residual: [B, T, O], dtype of input.
    ShapeError: A tensor does not fit."""
    import torch

    from still_kernels.common.naive import naive_norm

    inputs.check()
    x = inputs.input
    if inputs.norm_weight is not None:
        x = naive_norm(x, inputs.norm_weight, inputs.norm_epsilon)
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = inputs.turned_weight.T if inputs.weight is None else inputs.weight  # type: ignore[union-attr]
    product = x.to(wide) @ weight.to(wide)
    if inputs.residual is not None:
        product += inputs.residual.to(wide)
    return product.to(x.dtype)


@dataclass(frozen=True)
class Variant(StatelessVariant):
    """What kernels are compiled for.

    turned: Whether the weight is [O, I].
    normed, residual: Whether there are such inputs.
    aligned: Whether inputs and outputs are multiples of 8, which may be read and stored at once.
    whole: Whether inputs are a multiple of `gemm_plan.INNER`.
    span: How many outputs there are (`gemm_plan.SPANS`).
    """

    turned: int = 0
    normed: int = 0
    residual: int = 0
    aligned: int = 1
    whole: int = 1
    span: int = 0

    @property
    def plain(self) -> bool:
        """Whether the weight is [I, O]."""
        return not self.turned


PARTIAL, ARRIVALS = gemm.split_regions("O")

PLAN = Plan(
    DENSE_MATMUL,
    key={
        "dtype": "dtype",
        "turned": "has(turned_weight)",
        "normed": "has(norm_weight)",
        "residual": "has(residual)",
        "aligned": "O % 8 == 0 and I % 8 == 0",  # loads and stores of 16 bytes
        "whole": f"I % {gemm.INNER} == 0",
        "span": gemm.span("O"),
        "count_dtype": "'int32'",  # there are no counts
    },
    constants=(
        "few_outputs",
        "split_outputs",
        "split_inputs",
        "split_programs",
        "norm_apart",
        "some_rows",
        "some_outputs",
        "row_block",
        "output_block",
        "tma",  # 1: kernels of blocks copy by TMA
    ),
    checks=(Check("has(weight) != has(turned_weight)", "one of weight and turned_weight is wanted."),),
    define={
        "splits": f"1 if has(turned_weight) or has(norm_weight) and O * I < norm_apart else {gemm.splits('O', 'I')}"
    },
    workspace=(
        Region(
            "rows",
            "T",
            (f"max(tokens, {gemm.FEW_ROWS})", "I"),
            f"has(norm_weight) and (splits > 1 or not ({gemm.FEW}))",
        ),
        PARTIAL,
    ),
    persistent=(ARRIVALS,),
    aliases=(Alias("rows", "input", "not has(norm_weight)"),),
    matrices=(Matrix("rows", "tokens", "I"), Matrix("weight", "I", "O")),
    arguments={"M": "tokens", "N": "O", "K": "I", "epsilon": "norm_epsilon"},
    steps=(
        Branch(
            gemm.FEW,
            (
                Branch(
                    "splits > 1",
                    (
                        Branch("has(norm_weight)", (Launch("norm", ("tokens", "1", "1")),)),
                        Launch("split", gemm.split_grid("O")),
                    ),
                    (Launch("few", (f"ceil_div(tokens, {gemm.GROUP_ROWS})", "ceil_div(O, few_outputs)", "1")),),
                ),
            ),
            (
                Branch("has(norm_weight)", (Launch("norm", ("tokens", "1", "1")),)),
                Branch(
                    gemm.is_some("row_block", "output_block", "O"),
                    (gemm.by_blocks("some", "some_rows", "some_outputs", "O"),),
                    (gemm.by_blocks("many", "row_block", "output_block", "O"),),
                ),
            ),
        ),
    ),
)


def tile_table(variant: Variant, arch: int) -> TileTable:
    """Block sizes on an architecture (90 for sm_90)."""
    aligned, span, turned = variant.aligned, variant.span, variant.turned
    roomy = SHARED_BYTES[arch] >= blocks.WIDE_SHARED
    tma = blocks.by_tma(roomy, aligned, arch) and not turned
    if tma:
        tiles = {
            "some_tma": blocks.tma_tile(blocks.SOME_TMA[span], "rows", "weight"),
            "many_tma": blocks.tma_tile(blocks.MANY_TMA[span], "rows", "weight"),
        }
    else:
        tiles = {
            "some": blocks.block_tile(blocks.SOME[span], roomy),
            "many": blocks.many_tile(span, roomy, aligned, arch),
        }
    tiles["few"] = blocks.few_tile(span, roomy)
    if variant.normed:
        tiles["norm"] = KernelTile({"BC": blocks.NORM_COLUMNS}, 4)
    if not turned:
        tiles["split"] = blocks.split_tile(span, roomy, aligned)
    return TileTable(tiles, {**blocks.host_constants(span, tma), "norm_apart": blocks.NORM_APART})


DEFAULTS = [
    *(Variant(dtype, span=span) for dtype in HALVES for span in range(4)),
    *(Variant(dtype, normed=1, span=1) for dtype in HALVES),
    *(Variant(dtype, residual=1) for dtype in HALVES),
    *(Variant(dtype, turned=1, normed=1, span=3) for dtype in HALVES),
]
"""Both types: a plain product of each span, one behind a norm, one with a residual, and a head."""


def _draw(sizes: Mapping[str, int], layer: str, draw: Draw) -> Inputs:
    hidden, keys = sizes["heads"] * sizes["head_dim"], 2 * sizes["kv_heads"] * sizes["head_dim"]
    tokens = draw.tokens(hidden)
    if layer == "head":
        return Inputs(tokens, turned_weight=draw.weight(hidden, sizes["vocabulary"], turned=True))
    if layer == "output":
        return Inputs(tokens, draw.weight(hidden, hidden), residual=draw.tokens(hidden))
    return Inputs(tokens, draw.weight(hidden, hidden + keys), norm_weight=draw.norm(hidden))


def _plain(inputs: Inputs) -> Tensor:
    from torch.nn.functional import rms_norm

    x = inputs.input
    if inputs.norm_weight is not None:
        x = rms_norm(x, inputs.norm_weight.shape, inputs.norm_weight, inputs.norm_epsilon)
    product = x @ (inputs.turned_weight.T if inputs.weight is None else inputs.weight)  # type: ignore[union-attr]
    return product if inputs.residual is None else product + inputs.residual


def _flop(inputs: Inputs) -> float:
    weight = inputs.turned_weight if inputs.weight is None else inputs.weight
    return 2.0 * inputs.input[..., 0].numel() * weight.numel()  # type: ignore[union-attr]


OP = stateless_op(
    PLAN,
    Variant,
    DEFAULTS,
    tile_table,
    naive_dense_matmul,
    Calls(
        draw=_draw,
        flop=_flop,
        plain=_plain,
        moves={
            "few": blocks.FEW_MOVES,
            "split": blocks.SPLIT_MOVES,
            "some": blocks.MANY_MOVES,
            "many": blocks.MANY_MOVES,
        },
        decode=frozenset({"few", "split"}),
        layers=("query, key, value", "output", "head"),
        instead={name: f"{name}_tma" for name in ("some", "many")},
        peer="cuBLAS",
    ),
    module="still_kernels.dense_matmul.triton_dense",
    covers="products with dense weights have",
    compiled=lambda variant: {"ALIGNED": variant.aligned, "WHOLE": variant.whole},
    blocks={
        "few_outputs": "few.BN",
        "some_rows": "some.BM",
        "some_outputs": "some.BN",
        "row_block": "many.BM",
        "output_block": "many.BN",
    },
    optional={"weight": "plain", "turned_weight": "turned", "norm_weight": "normed", "residual": "residual"},
)
