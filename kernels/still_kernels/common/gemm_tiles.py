"""Block sizes and warps of kernels of GEMMs, and what tune tries for them. Integers only: no torch, no Triton."""

from __future__ import annotations

from dataclasses import replace

from still_kernels.common.gemm_plan import INNER
from still_kernels.tile import KernelTile, Setting, one, stages

WIDE_SHARED = 150 << 10
"""Shared memory that blocks of 128 x 256 take."""

FEW = ((16, 128, 4, 4), (32, 128, 8, 4), (64, 128, 8, 4), (128, 64, 8, 4))
"""By span: outputs, inputs at a time, warps and stages of a few rows. Best of 13 on an H200 over the products of SmolLM2-135M (spans 0
and 1) and Llama-3.1-8B (docs/notebook/tensorrt.md)."""
MANY = ((64, 64, 4, 4), (128, 128, 4, 3), (128, 256, 8, 3), (256, 128, 8, 3))
"""By span: rows, outputs, warps and stages of many rows, 64 inputs at a time. Best of 11 there."""
SOME = ((64, 64, 4, 4), (64, 64, 4, 4), (64, 128, 4, 4), (64, 128, 4, 4))
"""The same of some rows: 129 rows of Llama-3.1-8B's products."""
SOME_TMA = ((64, 64, 4, 6), (64, 64, 4, 6), (64, 128, 4, 6), (64, 256, 8, 4))
MANY_TMA = ((64, 64, 4, 4), (128, 128, 8, 4), (128, 256, 8, 4), (128, 256, 8, 4))
"""The same of kernels that copy by TMA, best of 5 to 8 (docs/notebook/tensorrt.md)."""
SPLIT = ((32, 64, 4, 6, 512), (64, 64, 4, 6, 512), (128, 64, 4, 4, 1024), (128, 64, 4, 4, 1024))
"""The same of a few rows whose programs share inputs, and the inputs that each has at least. Best of 44 and 30 for Llama-3.1-8B's output
and down; of spans 0 and 1 of 36 for SmolLM2's and Qwen2.5-1.5B's."""
SPLIT_PROGRAMS = 128
"""Programs that fill the chip."""
NORM_COLUMNS = 4096
NORM_APART = 1 << 24
"""Numbers of a weight behind a norm from which programs that share inputs are worth a launch for the norm."""


def few_tile(span: int, roomy: bool) -> KernelTile:
    """Of a few rows."""
    outputs, inner, warps, stages = FEW[span]
    stages = stages if roomy else 3
    return KernelTile({"BN": outputs, "BK": inner, "STAGES": stages}, warps, stages)


def split_tile(span: int, roomy: bool, aligned: int) -> KernelTile:
    """Of a few rows whose programs share inputs."""
    outputs, inner, warps, stages, _ = SPLIT[span]
    if outputs == 128 and not (roomy and aligned):
        warps, stages = 8, 3  # with 4 warps they spill on sm_89 and where sizes are odd
    return KernelTile({"BN": outputs, "BK": inner, "STAGES": stages}, warps, stages if roomy else 3)


def host_constants(span: int, tma: bool) -> dict[str, int]:
    """What the plans of dense products ask beside the kernels' blocks, for a span and kernels that copy by TMA or not."""
    outputs, *_, inputs = SPLIT[span]
    return {"split_outputs": outputs, "split_inputs": inputs, "split_programs": SPLIT_PROGRAMS, "tma": int(tma)}


def block_tile(sizes: tuple[int, int, int, int], roomy: bool) -> KernelTile:
    """Of blocks of rows and outputs, with so many warps and stages."""
    rows, outputs, warps, stages = sizes
    inner = INNER if roomy else INNER // 2
    return KernelTile({"BM": rows, "BN": outputs, "BK": inner, "GROUP": 8, "STAGES": stages}, warps, stages)


def many_tile(span: int, roomy: bool, aligned: int, arch: int) -> KernelTile:
    """Of many rows."""
    narrow = span >= 2 and not (roomy and aligned and arch >= 90)
    return block_tile((128, 128, 8, 3) if narrow else MANY[span], roomy)


def by_tma(roomy: bool, aligned: int, arch: int) -> bool:
    """Whether there are kernels that copy by TMA."""
    return roomy and bool(aligned) and arch == 90


def tma_tile(sizes: tuple[int, int, int, int], left: str, right: str) -> KernelTile:
    """Of blocks of rows and outputs that are copied by TMA.

    left, right: Names of the matrices.
    """
    return replace(block_tile(sizes, True), blocks={left: ("BM", "BK"), right: ("BK", "BN")})


FEW_MOVES: list[Setting] = [
    *one("BN", 16, 32, 64, 128),
    *one("BK", 64, 128, 256),
    *stages(3, 4, 6),
    *one("num_warps", 4, 8),
]
SPLIT_MOVES: list[Setting] = [
    *one("split_programs", 64, 128, 192, 256),
    *one("split_inputs", 512, 1024, 2048),
    *stages(3, 4, 5, 6),
    *one("num_warps", 4, 8),
]
MANY_MOVES: list[Setting] = [
    *one("BM", 64, 128, 256),
    *one("BN", 64, 128, 256),
    *one("BK", 32, 64),
    *stages(2, 3, 4),
    *one("num_warps", 4, 8),
]
