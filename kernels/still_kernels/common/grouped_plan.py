"""Ops that multiply each token by its chosen matrices: plan and block sizes. Imports neither torch nor Triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from still_graphs.ops import OpSpec
from still_kernels.common.gemm_tiles import WIDE_SHARED
from still_kernels.common.stateless import StatelessOp, StatelessVariant, keyed, stateless_op
from still_kernels.op_kernels import DTYPES
from still_kernels.plan import Branch, Check, Launch, Plan, Region, Step
from still_kernels.tile import SHARED_BYTES, KernelTile, TileTable

FEW_ROWS = 16
FEW = f"tokens <= {FEW_ROWS}"
"""So few tokens that most have matrices of their own."""
SOME = "tokens * K <= 32 * E"
"""So few tokens that a matrix has less than a block of `many`."""
_BLOCKS = {
    "few_inner": "few_gate_up.BN",
    "few_outputs": "few_down.BN",
    "pair_block": "sort.BP",
    "some_rows": "some_down.BM",
    "some_inner": "some_gate_up.BN",
    "some_outputs": "some_down.BN",
    "many_rows": "many_down.BM",
    "many_inner": "many_gate_up.BN",
    "many_outputs": "many_down.BN",
    "column_block": "add.BC",
}
"""The plan's constants, and their names in kernels."""
_FEW_CODES = {"few_codes_inner": "few_codes_gate_up.BN", "few_codes_outputs": "few_codes_down.BN"}
"""The same for kernels that use matrix instructions on codes for a few tokens; 0 without them, as for float32."""


def _gemms(kind: str) -> tuple[Launch, ...]:
    return tuple(
        Launch(f"{kind}_{name}", (f"blocks * ceil_div({outputs}, {kind}_{block})", "1", "1"))
        for name, outputs, block in (("gate_up", "R", "inner"), ("down", "I", "outputs"))
    )


def _few(kind: str) -> tuple[Step, Step]:
    return (
        Launch(f"{kind}_gate_up", (f"ceil_div(R, {kind}_inner)", "K", "tokens")),
        Launch(f"{kind}_down", (f"ceil_div(I, {kind}_outputs)", "tokens", "1")),
    )


def grouped_plan(
    spec: OpSpec, inner: str, key: Mapping[str, str], checks: Sequence[Check] = (), codes: bool = False
) -> Plan:
    """The plan of an op with the symbols B, T tokens, K matrices per token, E matrices, I channels, R rows of the first matrix.

    inner: Number of inner channels, an expression.
    key: Properties of variants besides those of `GroupedVariant`.
    codes: Whether matrices are words of codes.
    """
    few = (Branch("few_codes_inner > 0", _few("few_codes"), _few("few")),) if codes else _few("few")
    return Plan(
        spec,
        key=keyed(
            activation="activation",
            experts="max(16, pow2(E))",
            aligned=f"I % 32 == 0 and {inner} % 32 == 0",  # loads and stores of 16 bytes
            **key,
        ),
        constants=(*_BLOCKS, *(_FEW_CODES if codes else ())),
        checks=(
            Check(
                f"R == (2 * {inner} if activation == 'swiglu' else {inner})",
                "gate_up has {R} rows with {activation}, down {" + inner + "} columns.",
            ),
            *checks,
        ),
        define={
            "pairs": "tokens * K",
            "counted": "ceil_div(pairs, pair_block)",
            "block_rows": f"some_rows if {SOME} else many_rows",
            "blocks": "ceil_div(pairs, block_rows) + min(pairs, E)",
        },
        workspace=(
            Region("middle", "T", (f"max(tokens, {FEW_ROWS})", "K", inner)),
            Region("counts", "int32", ("counted", "E"), f"not ({FEW})"),
            Region("firsts", "int32", ("E",), f"not ({FEW})"),
            Region("blocks", "int32", ("ceil_div(pairs, some_rows) + E", 3), f"not ({FEW})"),
            Region("order", "int32", ("pairs",), f"not ({FEW})"),
            Region("parts", "T", ("pairs", "I"), f"not ({FEW})"),
        ),
        arguments={"P": "pairs", "C": "K", "E": "E", "N": "I", "M": inner, "R": "R", "counted": "counted", "NB": "blocks",
                   "rows": "block_rows"},
        steps=(
            Branch(
                FEW,
                few,
                (
                    Launch("count", ("counted", "1", "1")),
                    Launch("offsets", ("1", "1", "1")),
                    Launch("sort", ("counted", "1", "1")),
                    Branch(SOME, _gemms("some"), _gemms("many")),
                    Launch("add", ("tokens", "ceil_div(I, column_block)", "1")),
                ),
            ),
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class GroupedVariant(StatelessVariant):
    """Properties that kernels are compiled for.

    activation: swiglu or relu2.
    experts: Number of experts, rounded up to a power of two.
    aligned: Whether channels, including inner ones, are multiples of 32, so that they are read and stored without masks.
    """

    DTYPES = DTYPES
    activation: str = "swiglu"
    experts: int = 256
    aligned: int = 1


def tile_table(variant: GroupedVariant, arch: int) -> TileTable:
    """Block sizes on an architecture (90 for sm_90)."""
    wide = variant.dtype == "float32"
    large = SHARED_BYTES[arch] >= WIDE_SHARED and not wide
    roomy = large and variant.aligned
    many = (128, 128, 64, 8, 3) if roomy else (64, 64, 32, 4, 3 if large else 2)  # with 3 stages sm_89 spills

    def block(rows: int, outputs: int, inner: int, warps: int, stages: int) -> KernelTile:
        return KernelTile({"BM": rows, "BN": outputs, "BK": inner, "STAGES": stages}, warps, stages)

    # Two programs share a multiprocessor while one unpacks codes between its matrix instructions: 16 and 31% faster on an H100.
    registers = 128 if roomy and hasattr(variant, "bits") else None
    some = (16, 128, 64, 4, 4) if roomy else (16, 64, 32, 4, 2 if wide else 3)
    if hasattr(variant, "bits") and not wide:
        few = {
            "few_codes_gate_up": KernelTile({"BN": 16, "SPLITS": 4, "UNITS": 2}, 4),
            "few_codes_down": KernelTile({"BN": 16, "SPLITS": 8, "UNITS": 2}, 8),
        }
    else:
        few = {
            "few_gate_up": KernelTile({"BN": 16, "BK": 256, "STAGES": 3}, 4, 3),
            "few_down": KernelTile({"BN": 8, "BK": 512, "STAGES": 3}, 4, 3),
        }
    return TileTable(
        {
            **few,
            "count": KernelTile({"BP": 512}, 4),
            "offsets": KernelTile({}, 8),
            "sort": KernelTile({"BP": 512}, 8),
            "some_gate_up": block(*some),
            "some_down": block(*some),
            "many_gate_up": replace(block(*many), max_registers=registers),
            "many_down": replace(block(*many), max_registers=registers),
            "add": KernelTile({"BC": 1024}, 4),
        },
    )


def constants_of(variant: Any) -> dict[str, Any]:
    return {
        "GATED": int(variant.activation == "swiglu"),
        "EP": variant.experts,
        "ALIGNED": variant.aligned,
        "DOT": "tf32x3" if variant.dtype == "float32" else "tf32",
        "BITS": getattr(variant, "bits", 0),
        "BLOCK": getattr(variant, "block_size", 32),
    }


def grouped_op(
    plan: Plan, variant: type[GroupedVariant], defaults: Sequence[GroupedVariant], definition: Callable[[Any], Any],
    covers: str, module: str = "still_kernels.common.triton_grouped", **more: Any,
) -> StatelessOp:  # fmt: skip
    """The op of a grouped plan; arguments: see `stateless_op`."""
    return stateless_op(
        plan,
        variant,
        defaults,
        tile_table,
        definition,
        module=module,
        covers=covers,
        compiled=constants_of,
        blocks={name: place for name, place in {**_BLOCKS, **_FEW_CODES}.items() if name in plan.constants},
        **more,
    )
