"""still::DenseMatMul: tokens times a weight of 16-bit numbers, with a norm in front and a sum behind; sums in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from still_graphs.ops.dense_matmul import DENSE_MATMUL
from still_kernels.common import gemm_plan as gemm
from still_kernels.common import gemm_tiles as blocks
from still_kernels.common.stateless import Calls, StatelessInputs, StatelessVariant, defined, keyed, stateless_op
from still_kernels.op_kernels import HALVES
from still_kernels.plan import Alias, Branch, Check, Plan, Region
from still_kernels.tile import TileTable

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from still_kernels.common.calls import Draw

GEMM = gemm.Gemm("I", "O", "rows", "weight")
PARTIAL, ARRIVALS = gemm.split_regions("O")
NORM = Branch("has(norm_weight)", (gemm.NORM,))

PLAN = Plan(
    DENSE_MATMUL,
    key=keyed(
        turned="has(turned_weight)",
        normed="has(norm_weight)",
        residual="has(residual)",
        aligned="O % 8 == 0 and I % 8 == 0",  # loads and stores of 16 bytes
        whole=f"I % {gemm.INNER} == 0",
        span=gemm.span("O"),
    ),
    constants=(*GEMM.constants, *gemm.HOST, "norm_apart"),
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
    matrices=GEMM.matrices,
    arguments={"M": "tokens", "N": "O", "K": "I", "epsilon": "norm_epsilon"},
    steps=(Branch(gemm.FEW, (GEMM.split_step(NORM),), (NORM, GEMM.many_step())),),
)


@dataclass(frozen=True)
class Inputs(StatelessInputs, plan=PLAN):
    """Tokens and weight of one call, of one type.

    input: [B, T, I].
    weight: [I, O]; None: `turned_weight` is given.
    turned_weight: The same as [O, I].
    norm_weight: [I], of the norm that tokens pass first; None: they do not.
    residual: [B, T, O], added to the outputs.
    norm_epsilon: Added to the mean square of a token before its root divides the token.
    """

    input: Tensor
    weight: Tensor | None = None
    turned_weight: Tensor | None = None
    norm_weight: Tensor | None = None
    residual: Tensor | None = None
    norm_epsilon: float = 1e-5

    @property
    def inner_first(self) -> Tensor:
        """The weight as [I, O]."""
        return self.turned_weight.T if self.weight is None else self.weight  # type: ignore[union-attr]


@defined
def naive_dense_matmul(inputs: Inputs, wide: dtype) -> Tensor:
    """Tokens, normed where there is norm_weight, times the weight, plus the residual: [B, T, O]."""
    from still_kernels.common.naive import naive_norm

    x = inputs.input
    if inputs.norm_weight is not None:
        x = naive_norm(x, inputs.norm_weight, inputs.norm_epsilon, wide)
    outputs = x.to(wide) @ inputs.inner_first.to(wide)
    return outputs if inputs.residual is None else outputs + inputs.residual.to(wide)


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


def tile_table(variant: Variant, arch: int) -> TileTable:
    """Block sizes on an architecture (90 for sm_90)."""
    aligned, span, turned = variant.aligned, variant.span, variant.turned
    tma = blocks.by_tma(aligned, arch) and not turned
    tiles = blocks.DENSE.tiles(GEMM, span, aligned, arch, tma)
    if variant.normed:
        tiles["norm"] = blocks.NORM
    if not turned:
        tiles["split"] = blocks.split_tile(span, aligned, arch)
    return TileTable(tiles, {**blocks.host_constants(span, tma), "norm_apart": blocks.NORM_APART})


DEFAULTS = [
    *(Variant(dtype, span=span) for dtype in HALVES for span in range(4)),
    *(Variant(dtype, normed=1, span=1) for dtype in HALVES),
    *(Variant(dtype, residual=1) for dtype in HALVES),
    *(Variant(dtype, turned=1, normed=1, span=3) for dtype in HALVES),
]
"""Both types: a plain GEMM of each span, one behind a norm, one with a residual, and a head."""


def _draw(sizes: Mapping[str, int], layer: str, draw: Draw) -> Inputs:
    hidden, keys = sizes["heads"] * sizes["head_dim"], 2 * sizes["kv_heads"] * sizes["head_dim"]
    tokens = draw.tokens(hidden)
    if layer == "head":
        return Inputs(tokens, turned_weight=draw.weight(hidden, sizes["vocabulary"], turned=True))
    if layer == "output":
        return Inputs(tokens, draw.weight(hidden, hidden), residual=draw.tokens(hidden))
    return Inputs(tokens, draw.weight(hidden, hidden + keys), norm_weight=draw.norm(hidden))


OP = stateless_op(
    PLAN,
    Variant,
    DEFAULTS,
    tile_table,
    naive_dense_matmul,
    Calls(
        draw=_draw,
        flop=lambda inputs: 2.0 * inputs.input[..., 0].numel() * inputs.inner_first.numel(),
        layers=("query, key, value", "output", "head"),
        **blocks.gemm_calls((GEMM, []), split="split"),
    ),
    module="still_kernels.dense_matmul.triton_dense",
    covers="GEMMs with dense weights have",
    blocks=GEMM.constants,
    optional={"weight": "plain", "turned_weight": "turned", "norm_weight": "normed", "residual": "residual"},
)
