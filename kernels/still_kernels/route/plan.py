"""Kernels of still::Route; see `meaning.py` for the definition."""

from __future__ import annotations

from dataclasses import dataclass

from still_kernels.common.gemm_plan import FEW, block_launch
from still_kernels.common.stateless import StatelessVariant, keyed, stateless_op
from still_kernels.op_kernels import DTYPES, later
from still_kernels.plan import Branch, Check, Launch, Plan, Region
from still_kernels.route.spec import ROUTE
from still_kernels.tile import KernelTile, TileTable

CANDIDATES = "E // max(groups, 1) * top_groups"
PLAN = Plan(
    ROUTE,
    key=keyed(
        score="score",
        biased="has(bias)",
        grouped="groups > 1",
        experts="pow2(E)",
        chosen="pow2(k)",
        aligned="I % 8 == 0",  # loads of 16 bytes
    ),
    constants=("few_rows", "few_experts", "row_block", "expert_block"),
    checks=(
        Check(
            "groups >= 1 and E % max(groups, 1) == 0 and top_groups >= 1 and top_groups <= groups",
            "the best {top_groups} of {groups} groups of {E} experts; groups must divide them.",
        ),
        Check(f"k >= 1 and k <= {CANDIDATES}", "k={k} of {E} experts, {" + CANDIDATES + "} of which are candidates."),
    ),
    workspace=(Region("logits", "float32", ("tokens", "E")),),
    arguments={"M": "tokens", "N": "E", "K": "I", "k": "k", "normalize": "normalize", "groups": "groups",
               "top_groups": "top_groups", "epsilon": "epsilon", "scaling": "scaling"},
    steps=(
        Branch(
            FEW,
            (block_launch("few_scores", "few_rows", "few_experts", "E"),),
            (block_launch("scores", "row_block", "expert_block", "E"),),
        ),
        Launch("choose", ("tokens", "1", "1")),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Variant(StatelessVariant):
    """Properties that kernels are compiled for.

    score: softmax or sigmoid.
    biased, grouped: Whether there is a bias, and more than one group.
    experts, chosen: Numbers of experts, of all and of a token, rounded up to powers of two.
    aligned: Whether channels are a multiple of 8, for 16-byte loads.
    """

    DTYPES = DTYPES
    score: str = "softmax"
    biased: int = 0
    grouped: int = 0
    experts: int = 256
    chosen: int = 8
    aligned: int = 1


def tile_table(variant: Variant, arch: int) -> TileTable:
    """Block sizes on an architecture (90 for sm_90); for few tokens a program for every 16 experts."""
    few = {"BM": 16, "BN": 16, "BK": 32 if variant.dtype == "float32" else 128, "STAGES": 4}
    many = {"BM": 64, "BN": 64, "BK": 32, "STAGES": 3}
    return TileTable(
        {
            "few_scores": KernelTile(few, 4, 4),
            "scores": KernelTile(many, 4, 3),
            "choose": KernelTile({"EP": variant.experts, "KP": variant.chosen}, 1 if variant.experts <= 256 else 4),
        }
    )


OP = stateless_op(
    PLAN,
    Variant,
    [Variant(dtype) for dtype in DTYPES],
    tile_table,
    later("still_kernels.route.meaning", "naive_route"),
    module="still_kernels.route.kernels",
    compiled=lambda variant: {
        "SIGMOID": int(variant.score == "sigmoid"),
        "GROUPED": variant.grouped,
        "ALIGNED": variant.aligned,
        "EXACT": variant.dtype == "float32",
    },
    blocks={
        "few_rows": "few_scores.BM",
        "few_experts": "few_scores.BN",
        "row_block": "scores.BM",
        "expert_block": "scores.BN",
    },
    optional={"bias": "biased"},
)
