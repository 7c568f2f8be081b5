"""still::DenseMatMul: tokens times a weight of 16-bit numbers or in e4m3, with a norm in front and a sum behind; sums in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from still_graphs.errors import ConfigError
from still_kernels.common import gemm_plan as gemm
from still_kernels.common import gemm_tiles as blocks
from still_kernels.common.stateless import StatelessInputs, StatelessVariant, defined, keyed, stateless_op
from still_kernels.dense_matmul.spec import DENSE_MATMUL
from still_kernels.op_kernels import HALVES
from still_kernels.plan import Alias, Branch, Check, Launch, Matrix, Plan, Region
from still_kernels.tile import TileTable

if TYPE_CHECKING:
    from torch import Tensor, dtype


GEMM = gemm.Gemm("I", "O", "rows", "weight")
EIGHT = gemm.Gemm(
    "I",
    "O",
    "rounded",
    "codes",
    suffix="8",
    few="few8_outputs",
    some=("some8_rows", "some8_outputs"),
    many=("row8_block", "output8_block"),
    programs="many8_programs",
    fewest="many8_fewest",
)
"""Of codes in e4m3."""
MOST = 448.0
"""The largest number of e4m3."""
BLOCK = 128
"""Inputs that share a scale where those of an output have several."""
ROUND = Branch(
    f"I <= {blocks.FLOAT8_SHORT}",
    (Launch("round8_short", ("tokens", "1", "1")),),
    (Launch("round8", ("tokens", "1", "1")),),
)
PARTIAL, ARRIVALS = gemm.split_regions("O")
NORM = Branch("has(norm_weight)", (gemm.NORM,))

PLAN = Plan(
    DENSE_MATMUL,
    key=keyed(
        turned="has(turned_weight)",
        normed="has(norm_weight)",
        residual="has(residual)",
        aligned="O % 8 == 0 and I % 8 == 0",  # loads and stores of 16 bytes
        whole=f"I % ({BLOCK} if has(codes) else {gemm.INNER}) == 0",
        span=gemm.span("O"),
        float8="has(codes)",
        blocked="IS > 1 if has(codes) else 0",
    ),
    constants=(*GEMM.constants, *EIGHT.constants, *gemm.HOST, "norm_apart", "many8_programs", "many8_fewest"),
    checks=(
        Check(
            "has(weight) + has(turned_weight) + has(codes) == 1",
            "one of weight, turned_weight and codes is wanted.",
        ),
        Check("has(codes) == has(scales)", "codes and scales go together."),
        Check("not has(codes) or IW * 4 == I", "codes have {IW} words of four for I={I} inputs."),
        Check("not has(codes) or I % max(IS, 1) == 0", "scales of {IS} blocks do not divide I={I} inputs."),
    ),
    define={
        "splits": "1 if has(turned_weight) or has(codes) or has(norm_weight) and O * I < norm_apart else "
        + gemm.splits("O", "I")
    },
    workspace=(
        Region(
            "rows",
            "T",
            (f"max(tokens, {gemm.FEW_ROWS})", "I"),
            f"has(norm_weight) and not has(codes) and (splits > 1 or not ({gemm.FEW}))",
        ),
        PARTIAL,
        Region("rounded", "int8", ("tokens", "I"), "has(codes)"),
        Region("row_scales", "float32", ("tokens",), "has(codes)"),
    ),
    persistent=(ARRIVALS,),
    aliases=(Alias("rows", "input", "not has(norm_weight)"),),
    matrices=(
        *GEMM.matrices,
        Matrix("rounded", "tokens", "I"),
        Matrix("codes", "O", "I"),
        Matrix("output", "tokens", "O"),
    ),
    arguments={"M": "tokens", "N": "O", "K": "I", "epsilon": "norm_epsilon"},
    steps=(
        Branch(
            "has(codes)",
            (ROUND, Branch(f"tokens <= {gemm.GROUP_ROWS}", (EIGHT.few_step(),), (EIGHT.many_step(),))),
            (Branch(gemm.FEW, (GEMM.split_step(NORM),), (NORM, GEMM.many_step())),),
        ),
    ),
)


@dataclass(frozen=True)
class Inputs(StatelessInputs, plan=PLAN):
    """Tensors and attributes of one call, of one type, as of the op's spec."""

    input: Tensor
    weight: Tensor | None = None
    turned_weight: Tensor | None = None
    norm_weight: Tensor | None = None
    residual: Tensor | None = None
    codes: Tensor | None = None
    scales: Tensor | None = None
    norm_epsilon: float = 1e-5

    @property
    def inner_first(self) -> Tensor:
        """The weight as [I, O], of codes in float32."""
        if self.codes is not None:
            import torch

            assert self.scales is not None
            numbers = self.codes.contiguous().view(torch.float8_e4m3fn).float().T
            return numbers * self.scales.repeat_interleave(len(numbers) // len(self.scales), 0)
        return self.turned_weight.T if self.weight is None else self.weight  # type: ignore[union-attr]


def rounded_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [.., I] in e4m3, and their scales, float32 [.., 1]."""
    import torch

    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True)
    scales = most / torch.full_like(most, MOST)  # by a number CUDA multiplies with the reciprocal
    return (wide / torch.where(scales > 0, scales, 1)).clamp(-MOST, MOST).to(torch.float8_e4m3fn), scales


@defined
def naive_dense_matmul(inputs: Inputs, wide: dtype) -> Tensor:
    """Tokens, normed where there is norm_weight, rounded where the weight is codes, times the weight, plus the residual: [B, T, O]."""
    from still_kernels.common.naive import naive_norm

    x = inputs.input
    if inputs.norm_weight is not None:
        x = naive_norm(x, inputs.norm_weight, inputs.norm_epsilon, wide)
    if inputs.codes is not None:
        codes, scales = rounded_tokens(x)
        x = codes.to(wide) * scales.to(wide)
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
    float8, blocked: Whether the weight is in e4m3, with a scale for each block of an output's inputs.
    """

    turned: int = 0
    normed: int = 0
    residual: int = 0
    aligned: int = 1
    whole: int = 1
    span: int = 0
    float8: int = 0
    blocked: int = 0

    @property
    def plain(self) -> bool:
        """Whether the weight is [I, O]."""
        return not self.turned and not self.float8


FLOAT8_ARCH = 89
"""The first architecture with matrix instructions for e4m3."""


def tile_table(variant: Variant, arch: int) -> TileTable:
    """Block sizes on an architecture (90 for sm_90).

    Raises:
        ConfigError: It has no matrix instructions for e4m3, and the weight is in that.
    """
    if variant.float8:
        if arch < FLOAT8_ARCH:
            raise ConfigError(
                f"sm_{arch} has no matrix instructions for e4m3 (fp8), which sm_{FLOAT8_ARCH} and later have."
            )
        tma = blocks.by_tma(variant.aligned, arch) and bool(variant.whole)
        tiles = blocks.float8_tiles(EIGHT, variant.span, arch, tma, bool(variant.blocked))
        return TileTable(tiles, _host(variant.span, tma))
    aligned, span, turned = variant.aligned, variant.span, variant.turned
    tma = blocks.by_tma(aligned, arch) and not turned
    tiles = blocks.DENSE.tiles(GEMM, span, aligned, arch, tma)
    if variant.normed:
        tiles["norm"] = blocks.NORM
    if not turned:
        tiles["split"] = blocks.split_tile(span, aligned, arch)
    return TileTable(tiles, _host(span, tma))


def _host(span: int, tma: bool) -> dict[str, int]:
    own = {
        "norm_apart": blocks.NORM_APART,
        "many8_programs": blocks.FLOAT8_PROGRAMS,
        "many8_fewest": blocks.FLOAT8_FEWEST,
    }
    return {**blocks.host_constants(span, tma), **own}


DEFAULTS = [
    *(Variant(dtype, span=span) for dtype in HALVES for span in range(4)),
    *(Variant(dtype, normed=1, span=1) for dtype in HALVES),
    *(Variant(dtype, residual=1) for dtype in HALVES),
    *(Variant(dtype, turned=1, normed=1, span=3) for dtype in HALVES),
]
"""Both types: a plain GEMM of each span, one behind a norm, one with a residual, and a head."""


OP = stateless_op(
    PLAN,
    Variant,
    DEFAULTS,
    tile_table,
    naive_dense_matmul,
    module="still_kernels.dense_matmul.kernels",
    covers="GEMMs with dense weights have",
    also=(
        Check(
            "not has(codes) or I % 16 == 0", "I={I} inputs; GEMMs with codes in e4m3 have kernels for multiples of 16."
        ),
        Check(
            f"not has(codes) or IS == 1 or IS * {BLOCK} == I",
            f"scales are {{IS}} for I={{I}} inputs; the kernels have one for each output, or for each {BLOCK} inputs of it.",
        ),
    ),
    compiled=lambda variant: {n.upper(): getattr(variant, n) for n in ("aligned", "whole", "blocked")},
    blocks={**GEMM.constants, **EIGHT.constants},
    optional={
        "weight": "plain",
        "turned_weight": "turned",
        "norm_weight": "normed",
        "residual": "residual",
        "codes": "float8",
        "scales": "float8",
    },
)
