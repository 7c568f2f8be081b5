"""Block sizes and warps of kernels of GEMMs. Integers only: no torch, no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from still_kernels.common.gemm_plan import GROUP_ROWS, HOST, INNER, Gemm
from still_kernels.tile import SHARED_BYTES, KernelTile

WIDE_SHARED = 150 << 10
"""Shared memory that blocks of 128 x 256 take."""


@dataclass(frozen=True)
class GemmTiles:
    """Block sizes of kernels by span (`gemm_plan.SPANS`).

    Args:
        few: Outputs, inputs at a time, warps and stages of a few rows.
        some, many: Rows, outputs, warps and stages of some and of many rows, 64 inputs at a time.
        some_tma, many_tma: The same of kernels that copy by TMA.
        narrow: The same of many rows from span `narrow_from` where wide sums would not fit into registers or shared memory.
        few_inner: Inputs at a time of a few rows where shared memory is short, at most.
    """

    few: Sequence[tuple[int, int, int, int]]
    some: Sequence[tuple[int, int, int, int]]
    many: Sequence[tuple[int, int, int, int]]
    some_tma: Sequence[tuple[int, int, int, int]]
    many_tma: Sequence[tuple[int, int, int, int]]
    narrow: tuple[int, int, int, int]
    narrow_from: int
    few_inner: int

    def tiles(self, gemm: Gemm, span: int, aligned: int, arch: int, tma: bool) -> dict[str, KernelTile]:
        """Of the kernels of a GEMM on an architecture (90 for sm_90), which copy by TMA or not."""
        suffix = gemm.suffix
        roomy = SHARED_BYTES[arch] >= WIDE_SHARED
        outputs, inner, warps, stages = self.few[span]
        inner, stages = (inner, stages) if roomy else (min(inner, self.few_inner), 3)
        few = {f"few{suffix}": KernelTile({"BN": outputs, "BK": inner, "STAGES": stages}, warps, stages)}
        if tma:
            copied = {gemm.left: ("BM", "BK"), gemm.right: ("BK", "BN")}
            some, many = (replace(_block(sizes[span], True), blocks=copied) for sizes in (self.some_tma, self.many_tma))
            return few | {f"some{suffix}_tma": some, f"many{suffix}_tma": many}
        narrow = span >= self.narrow_from and not (roomy and aligned and arch >= 90)
        many = _block(self.narrow if narrow else self.many[span], roomy)
        return few | {f"some{suffix}": _block(self.some[span], roomy), f"many{suffix}": many}


def _block(sizes: tuple[int, int, int, int], roomy: bool) -> KernelTile:
    rows, outputs, warps, stages = sizes
    inner = INNER if roomy else INNER // 2
    return KernelTile({"BM": rows, "BN": outputs, "BK": inner, "GROUP": 8, "STAGES": stages}, warps, stages)


DENSE = GemmTiles(
    few=((16, 128, 4, 4), (32, 128, 8, 4), (64, 128, 8, 4), (128, 64, 8, 4)),
    some=((64, 64, 4, 4), (64, 64, 4, 4), (64, 128, 4, 4), (64, 128, 4, 4)),
    many=((64, 64, 4, 4), (128, 128, 4, 3), (128, 256, 8, 3), (256, 128, 8, 3)),
    some_tma=((64, 64, 4, 6), (64, 64, 4, 6), (64, 128, 4, 6), (64, 256, 8, 4)),
    many_tma=((64, 64, 4, 4), (128, 128, 8, 4), (128, 256, 8, 4), (128, 256, 8, 4)),
    narrow=(128, 128, 8, 3),
    narrow_from=2,
    few_inner=128,
)
"""Best of 13 of a few rows on an H200 over the linear layers of SmolLM2-135M (spans 0 and 1) and Llama-3.1-8B, of 11 of many, of 129 rows
of Llama-3.1-8B's for some; by TMA of 5 to 8 (docs/notebook/tensorrt.md)."""
GATED = GemmTiles(
    few=((16, 64, 4, 6), (16, 64, 4, 6), (32, 128, 8, 4), (64, 64, 8, 4)),
    some=((64, 32, 4, 4), (64, 32, 4, 4), (64, 64, 4, 4), (64, 128, 4, 3)),
    many=((64, 32, 4, 4), (128, 64, 4, 3), (128, 128, 8, 3), (128, 128, 8, 3)),
    some_tma=((64, 64, 4, 4), (64, 64, 4, 4), (64, 128, 8, 4), (64, 128, 8, 4)),
    many_tma=((64, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 4), (128, 128, 8, 4)),
    narrow=(128, 64, 8, 3),
    narrow_from=1,
    few_inner=64,
)
"""With half the outputs: a program computes a gate and a number beside it."""
SPLIT = ((32, 64, 4, 6, 512), (64, 64, 4, 6, 512), (128, 64, 4, 4, 1024), (128, 64, 4, 4, 1024))
"""By span: outputs, inputs at a time, warps and stages of a few rows whose programs share inputs, and the inputs that each has at least.
Best of 44 and 30 for Llama-3.1-8B's output and down; of spans 0 and 1 of 36 for SmolLM2's and Qwen2.5-1.5B's."""
SPLIT_PROGRAMS = 128
"""Programs that fill the chip."""
NORM = KernelTile({"BC": 4096}, 4)
"""Of the norm in front of a GEMM."""
NORM_APART = 1 << 24
"""Numbers of a weight behind a norm from which programs that share inputs are worth a launch for the norm."""


FLOAT8 = {
    "some8": ((64, 32, 4, 6), (64, 64, 4, 6), (64, 128, 4, 6), (64, 128, 4, 4)),
    "many8": ((64, 64, 4, 4), (128, 128, 8, 4), (128, 128, 8, 4), (128, 128, 8, 4)),
}
"""Rows, outputs, warps and stages by span of some and of many rows of codes in e4m3, 128 inputs at a time. Best of 7 of some at 64, 256 and
512 rows of Llama-3.1-8B's and Qwen2.5-1.5B's linear layers (docs/notebook/quantization.md)."""
FLOAT8_WIDE = (128, 256, 8, 3)
"""The same of many rows by TMA from span 1 on. With scales of blocks, which are added to other sums, it would not fit."""
FLOAT8_SHORT = 2048
"""Inputs up to which a token is rounded by 4 warps: 8,192 tokens of 1,536 in 20 for 27 us, where of 14,336 they take 211 for 138."""
FLOAT8_PROGRAMS = 132
"""That share the blocks of many rows by TMA: one for each multiprocessor of an H100 or H200."""
FLOAT8_FEWEST = 96
"""Blocks of many rows that are faster than those of some: 512 rows of 6,144 outputs take 31 for 36 us."""


def float8_tiles(gemm: Gemm, span: int, arch: int, tma: bool, blocked: bool) -> dict[str, KernelTile]:
    """Of codes in e4m3; arguments: see `GemmTiles.tiles`. The weight is on the left of a few rows: such instructions take 64 there.

    blocked: An output has several scales.
    """
    roomy = SHARED_BYTES[arch] >= WIDE_SHARED
    few = KernelTile({"BM": GROUP_ROWS, "BN": 64, "BK": 2 * INNER, "STAGES": 8 if roomy else 6}, 4, 8 if roomy else 6)
    found = {"round8_short": KernelTile({"BC": FLOAT8_SHORT}, 4), "round8": KernelTile({"BC": 4096}, 8), "few8": few}
    for kernel, sizes in FLOAT8.items():
        many = kernel == "many8" and tma
        rows, outputs, warps, stages = FLOAT8_WIDE if many and span > 0 and not blocked else sizes[span]
        tile = _block((rows, outputs, warps, stages if roomy else min(stages, 3)), True)
        constants = {**tile.constants, "BK": 2 * INNER}
        copied: dict[str, tuple[int | str, int | str]] = {gemm.left: ("BM", "BK"), gemm.right: ("BN", "BK")}
        if many:  # half of a wide block at a time leaves shared memory for a residual
            constants |= {"GROUP": 16, "STORE": min(outputs, 128)}
            copied["output"] = ("BM", "STORE")
        tile = replace(tile, constants=constants)
        found |= {f"{kernel}_tma": replace(tile, blocks=copied)} if tma else {kernel: tile}
    return found


def split_tile(span: int, aligned: int, arch: int) -> KernelTile:
    """Of a few rows whose programs share inputs."""
    roomy = SHARED_BYTES[arch] >= WIDE_SHARED
    outputs, inner, warps, stages, _ = SPLIT[span]
    if outputs == 128 and not (roomy and aligned):
        warps, stages = 8, 3  # with 4 warps they spill on sm_89 and where sizes are odd
    return KernelTile({"BN": outputs, "BK": inner, "STAGES": stages}, warps, stages if roomy else 3)


def host_constants(span: int, tma: bool) -> dict[str, int]:
    """Values of `gemm_plan.HOST` for a span and kernels that copy by TMA or not."""
    outputs, *_, inputs = SPLIT[span]
    return dict(zip(HOST, (outputs, inputs, SPLIT_PROGRAMS, int(tma)), strict=True))


def by_tma(aligned: int, arch: int) -> bool:
    """Whether there are kernels that copy by TMA."""
    return SHARED_BYTES[arch] >= WIDE_SHARED and bool(aligned) and arch == 90
