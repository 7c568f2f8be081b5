"""Block sizes and warps of GEMM kernels. Integers only: no torch, no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from still_kernels.common.gemm_plan import GROUP_ROWS, HOST, INNER, Gemm
from still_kernels.tile import SHARED_BYTES, KernelTile

WIDE_SHARED = 150 << 10
"""Shared memory of blocks of 128 x 256."""


@dataclass(frozen=True)
class GemmTiles:
    """Block sizes of kernels by span (`gemm_plan.SPANS`).

    Args:
        few: Outputs, inputs per step, warps and stages for few rows.
        some, many: Rows, outputs, warps and stages for some and for many rows, 64 inputs per step.
        some_tma, many_tma: The same for kernels that copy by TMA.
        narrow: The same for many rows from span `narrow_from`, where wide sums would not fit into registers or shared memory.
        few_inner: Most inputs per step for few rows where shared memory is short.
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
        """Tiles of a GEMM's kernels on an architecture (90 for sm_90), with or without TMA."""
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
"""On an H200 over the linear layers of SmolLM2-135M (spans 0 and 1) and Llama-3.1-8B: best of 13 for few rows, of 11 for many; for some the
best at 129 rows of Llama-3.1-8B; by TMA best of 5 to 8 (docs/notebook/tensorrt.md)."""
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
"""Half the outputs, because a program computes the gate and the up projection."""
SPLIT = ((32, 64, 4, 6, 512), (64, 64, 4, 6, 512), (128, 64, 4, 4, 1024), (128, 64, 4, 4, 1024))
"""By span: outputs, inputs per step, warps, stages, and least inputs per program, for few rows whose programs share inputs. Best of 44 and
30 for Llama-3.1-8B's output and down layers; of 36 for spans 0 and 1, of SmolLM2 and Qwen2.5-1.5B."""
SPLIT_PROGRAMS = 128
"""Number of programs that fills the chip."""
NORM = KernelTile({"BC": 4096}, 4)
"""The norm before a GEMM."""
NORM_APART = 1 << 24
"""Smallest size of a weight after a norm for which sharing inputs is worth a separate launch of the norm."""


FLOAT8 = {
    "some8": ((64, 32, 4, 6), (64, 64, 4, 6), (64, 128, 4, 6), (64, 128, 4, 4)),
    "many8": ((64, 64, 4, 4), (128, 128, 8, 4), (128, 128, 8, 4), (128, 128, 8, 4)),
}
"""By span: rows, outputs, warps and stages for some and for many rows of e4m3 codes, 128 inputs per step. Best of 7 for some at 64, 256 and
512 rows of Llama-3.1-8B's and Qwen2.5-1.5B's linear layers (docs/notebook/quantization.md)."""
FLOAT8_WIDE = (128, 256, 8, 3)
"""The same for many rows by TMA from span 1. It does not fit with block scales, which need other sums."""
FLOAT8_SHORT = 2048
"""Largest number of inputs for which 4 warps round a token: 8,192 tokens of 1,536 in 20 instead of 27 us. With 14,336 they take 211 instead
of 138."""
FLOAT8_PROGRAMS = 132
"""Programs that share the blocks of many rows by TMA: one for each multiprocessor of an H100 or H200."""
FLOAT8_FEWEST = 96
"""Smallest number of blocks for which `many` is faster than `some`: 512 rows of 6,144 outputs take 31 instead of 36 us."""


def float8_tiles(gemm: Gemm, span: int, arch: int, tma: bool, blocked: bool) -> dict[str, KernelTile]:
    """Tiles for e4m3 codes; arguments: see `GemmTiles.tiles`. For few rows the weight is the left operand, since such instructions have 64
    rows there.

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
        if many:  # half of a wide block per step leaves shared memory for a residual
            constants |= {"GROUP": 16, "STORE": min(outputs, 128)}
            copied["output"] = ("BM", "STORE")
        tile = replace(tile, constants=constants)
        found |= {f"{kernel}_tma": replace(tile, blocks=copied)} if tma else {kernel: tile}
    return found


def split_tile(span: int, aligned: int, arch: int) -> KernelTile:
    """The tile for few rows whose programs share inputs."""
    roomy = SHARED_BYTES[arch] >= WIDE_SHARED
    outputs, inner, warps, stages, _ = SPLIT[span]
    if outputs == 128 and not (roomy and aligned):
        warps, stages = 8, 3  # 4 warps spill registers on sm_89 and with unaligned sizes
    return KernelTile({"BN": outputs, "BK": inner, "STAGES": stages}, warps, stages if roomy else 3)


def host_constants(span: int, tma: bool) -> dict[str, int]:
    """Values of `gemm_plan.HOST` for a span, with or without TMA."""
    outputs, *_, inputs = SPLIT[span]
    return dict(zip(HOST, (outputs, inputs, SPLIT_PROGRAMS, int(tma)), strict=True))


def by_tma(aligned: int, arch: int) -> bool:
    """Whether kernels that copy by TMA exist."""
    return SHARED_BYTES[arch] >= WIDE_SHARED and bool(aligned) and arch == 90
