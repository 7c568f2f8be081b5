#!/usr/bin/env python3
"""Times of the main kernels on GPUs that nobody ran them on, computed from machine code: Markdown tables.

    python tools/predict_times.py [--arch 80,86] [WORD ...]
    python tools/predict_times.py --error
    python tools/predict_times.py --blocks [--arch 80,86]

A call moves bytes and multiplies; the slower of both at a GPU's rates is its floor. On sm_90 calls of a kernel were measured (`KERNELS`): a
line through them, start + slow * floor, is the kernel's there. Elsewhere the start is the same and `slow` grows where fewer warps are
resident for each byte or product that a multiprocessor should have in flight, or, of a prompt's softmax attention, where nothing hides what
is no product. Warps follow from registers, shared memory and threads of the kernel as it is compiled for the architecture. GPUs are in
`GPUS`: data sheets, of which a copy reaches 0.87 and a GEMM 0.75, as on an H100.
`--error` has the line's own error on sm_90: each measured call computed from the others. `--blocks` has what `BLOCKS` of a kernel give, and
those that the model takes. WORDs choose calls by part of their name.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from still_kernels.hybrid_attention.config import HybridAttentionConfig

COPY, GEMM = 0.87, 0.75
Cost = tuple[float, float]
"""Bytes and FLOP of a call."""


@dataclass(frozen=True)
class Gpu:
    """Of one architecture: multiprocessors, bytes/s and FLOP/s (16 bits, dense, summed in float32) of the data sheet; of a
    multiprocessor warps, bytes of shared memory, float32 numbers a clock, and clocks a second."""

    name: str
    processors: int
    copy: float
    gemm: float
    warps: int
    shared: int
    lanes: int
    clock: float

    def pair_clocks(self, dim: int, keys: int, programs: int) -> tuple[float, float]:
        """Clocks of a multiprocessor for one query and key of softmax attention, and those of its two products alone.

        What is no product takes turns with products in one program and hides behind another's: 6 operations in float32, a maximum's
        share of `dim` by `keys` that are taken at a time, an exponential, of which there are 16 a clock.
        """
        products = 4 * dim * self.processors * self.clock / (GEMM * self.gemm)
        others = (6 + dim / keys) / self.lanes + 1 / 16
        return max(products, others) if programs > 1 else products + others, products

    def floor_us(self, cost: Cost) -> float:
        return 1e6 * max(cost[0] / (COPY * self.copy), cost[1] / (GEMM * self.gemm))

    def by_bytes(self, cost: Cost) -> bool:
        """Whether bytes take longer than products."""
        return cost[0] / (COPY * self.copy) > cost[1] / (GEMM * self.gemm)


GPUS = {
    80: Gpu("A100 80 GB", 108, 2.04e12, 312e12, 64, 164 << 10, 64, 1.41e9),
    86: Gpu("A10", 72, 0.60e12, 125e12, 48, 100 << 10, 128, 1.695e9),
    89: Gpu("L40S", 142, 0.864e12, 362e12, 48, 100 << 10, 128, 2.52e9),
    90: Gpu("H100", 132, 3.35e12, 989e12, 64, 228 << 10, 128, 1.83e9),
    100: Gpu("B200", 148, 8.0e12, 2250e12, 64, 228 << 10, 128, 1.965e9),
    120: Gpu("RTX 5090", 170, 1.79e12, 209e12, 48, 100 << 10, 128, 2.407e9),
}
H100, H200 = GPUS[90], Gpu("H200", 132, 4.8e12, 989e12, 64, 228 << 10, 128, 1.83e9)


@dataclass(frozen=True)
class Code:
    """What a kernel is as it is compiled: registers of a thread, bytes of shared memory, warps of a program, keys at a time if any."""

    registers: int
    shared: int
    warps: int
    keys: int = 0

    def resident(self, gpu: Gpu) -> int:
        """Warps that a multiprocessor holds; registers are given to warps by 256."""
        of_warp = -(-self.registers * 32 // 256) * 256
        programs = min(65536 // of_warp // self.warps, gpu.shared // (self.shared + 1024), gpu.warps // self.warps)
        return programs * self.warps


@dataclass(frozen=True)
class Kernel:
    """Calls whose time is mostly one kernel's, as they were measured on sm_90.

    calls: By name: cost and microseconds on `on` (docs/notebook).
    shown: Names of those that are computed for other GPUs.
    fields: Of the op's variant.
    like: The architecture whose machine code stands for that of the kernel that was measured, where sm_90 has another one now.
    as_measured: The kernel's setting then, where it is another one there.
    softmax: D, of a prompt's softmax attention, whose time is `Gpu.pair_clocks`.
    """

    op: str
    kernel: str
    on: Gpu
    calls: dict[str, tuple[Cost, float]]
    shown: Sequence[str]
    fields: dict[str, Any]
    like: int = 90
    as_measured: tuple[tuple[str, int], ...] = ()
    softmax: int = 0


def _hybrid(tokens: int, batch: int = 0) -> Cost:
    from tools.kernels.ops.hybrid_attention import decode_cost, prefill_cost

    layer = HybridAttentionConfig(32, 8, 128, chunk_size=64, salient_per_chunk=4, capacity_tokens=tokens + 64)
    return decode_cost(layer, tokens, batch) if batch else prefill_cost(layer, tokens)


def _softmax(tokens: int, batch: int = 0) -> Cost:
    from tools.kernels.ops.attention import decode_cost, prefill_cost

    return decode_cost(32, 8, 128, tokens, batch) if batch else prefill_cost(32, 8, 128, tokens)


def _delta(tokens: int, batch: int = 0) -> Cost:
    from tools.kernels.ops.linear_attention import decode_cost, prefill_cost

    return decode_cost(32, 128, 128, batch, True) if batch else prefill_cost(32, 32, 128, 128, tokens, True)


def _blocks(select: bool, tokens: int, length: int) -> Cost:
    """Of MiniCPM-SALA's layer: 32 heads over 2, means of 16 keys at the least."""
    from tools.kernels.ops import block_attention as attend
    from tools.kernels.ops import select_blocks as choose
    from tools.kernels.ops.attention import Layer
    from tools.kernels.work import Kind

    layer, kind = Layer(32, 2, 128, tokens + length), Kind("", 1, tokens, length)
    return choose.cost(layer, kind, 16, 64) if select else attend.cost(layer, kind)


def _linear(outputs: int, inputs: int, bits: float, tokens: int = 1) -> Cost:
    moved = outputs * inputs * bits / 8 + 2.0 * tokens * (outputs + inputs) * (tokens > 1)
    return moved, 2.0 * outputs * inputs * tokens


def _experts(tokens: int, bits: float) -> Cost:
    """Of Qwen3.5-35B-A3B, 256 experts of which 8 are chosen at random; `bits` of a weight with what its block has."""
    numbers = 3 * 2048 * 512
    read = 256 * (1 - (1 - 8 / 256) ** tokens)
    return read * numbers * bits / 8 + 2 * 2 * 2048 * tokens, 16.0 * tokens * numbers


FOUR = 4 + 16 / 32 + 4 / 32
LAYERS = {"6,144 x 4,096": (6144, 4096), "4,096 x 4,096": (4096, 4096), "28,672 x 4,096": (28672, 4096),
          "4,096 x 14,336": (4096, 14336)}  # fmt: skip
FEW_US = {1: (8.4, 7.2, 25.9, 14.9), 8: (9.8, 8.2, 27.2, 17.9)}
LLAMA = {"dtype": "bfloat16", "head_dim": 128, "feature_rows": 128}
WIDE = {"dtype": "bfloat16", "head_dim": 128}
BRAIN = {"dtype": "bfloat16"}
TOKEN, PROMPT = "a token", "8,192 tokens"
STEP, EIGHT, SHORT = "step after 65,536", "the same, 8 sequences", "step after 8,192"


def _steps(cost: Callable[[int, int], Cost], times: Sequence[float]) -> dict[str, tuple[Cost, float]]:
    sizes = ((STEP, 65536, 1), (EIGHT, 65536, 8), (SHORT, 8192, 1), (f"{SHORT}, 8 sequences", 8192, 8))
    return {name: (cost(tokens, batch), time_us) for (name, tokens, batch), time_us in zip(sizes, times, strict=True)}


KERNELS = [
    Kernel(
        "HybridAttention",
        "attend",
        H200,
        {"prompt of 65,536": (_hybrid(65536), 8780)},
        ("prompt of 65,536",),
        LLAMA,
        80,
        (("BN", 64), ("STAGES", 3), ("num_stages", 3)),
        softmax=128,
    ),
    Kernel(
        "HybridAttention",
        "attend_tma",
        H200,
        {f"prompt of {n:,} by TMA": (_hybrid(n), us) for n, us in ((65536, 6940), (32768, 2540), (8192, 509))},
        (),
        LLAMA,
    ),
    Kernel("HybridAttention", "decode", H200, _steps(_hybrid, (28.1, 146.3, 10.5, 46.3)), (STEP, EIGHT, SHORT), LLAMA),
    Kernel(
        "Attention",
        "attend",
        H200,
        {"prompt of 8,192": (_softmax(8192), 1150)},
        ("prompt of 8,192",),
        WIDE,
        softmax=128,
    ),
    Kernel("Attention", "decode", H200, _steps(_softmax, (82.0, 531, 28.7, 86.5)), (STEP, EIGHT), WIDE),
    Kernel(
        "SelectBlocks",
        "score",
        H100,
        {"prompt of 65,536": (_blocks(True, 65536, 0), 8700)},
        ("prompt of 65,536",),
        WIDE,
    ),
    Kernel(
        "BlockAttention",
        "attend",
        H100,
        {"prompt of 65,536": (_blocks(False, 65536, 0), 25400)},
        ("prompt of 65,536",),
        WIDE,
        softmax=128,
    ),
    Kernel(
        "BlockAttention",
        "decode",
        H100,
        {"step after 262,144": (_blocks(False, 1, 262143), 8.8)},
        ("step after 262,144",),
        WIDE,
    ),
    Kernel(
        "LinearAttention",
        "scan",
        H200,
        {f"gated delta, prompt of {n:,}": (_delta(n), us) for n, us in ((65536, 4222), (8192, 594))},
        ("gated delta, prompt of 65,536",),
        {"dtype": "bfloat16", "head_dim": 128, "value_dim": 128},
    ),
    Kernel(
        "MatMulNBits",
        "few",
        H200,
        {
            f"4 bits, {name}, {tokens if tokens > 1 else 'a'} token{'s' * (tokens > 1)}": (
                (_linear(*LAYERS[name], FOUR)[0], _linear(*LAYERS[name], FOUR, tokens)[1]),
                us,
            )
            for tokens, times in FEW_US.items()
            for name, us in zip(LAYERS, times, strict=True)
        },
        ("4 bits, 28,672 x 4,096, a token", "4 bits, 4,096 x 4,096, a token"),
        {"span": 2},
    ),
    Kernel(
        "DenseMatMul",
        "many",
        H100,
        {
            f"{name}, {PROMPT}": (_linear(*LAYERS[name], 16, 8192), us)
            for name, us in (("6,144 x 4,096", 570), ("28,672 x 4,096", 2622), ("4,096 x 14,336", 1285))
        },
        (f"28,672 x 4,096, {PROMPT}",),
        {"dtype": "float16", "span": 3},
    ),
    Kernel(
        "Experts",
        "few_gate_up",
        H100,
        {TOKEN: (_experts(1, 16), 22.3), "8 tokens": (_experts(8, 16), 133.7)},
        (TOKEN,),
        BRAIN,
    ),
    Kernel("Experts", "many_gate_up", H100, {PROMPT: (_experts(8192, 16), 2029)}, (PROMPT,), BRAIN, 80),
    Kernel(
        "ExpertsNBits",
        "few_codes_gate_up",
        H100,
        {f"4 bits, {TOKEN}": (_experts(1, FOUR), 12.4), "4 bits, 8 tokens": (_experts(8, FOUR), 60.8)},
        (f"4 bits, {TOKEN}",),
        BRAIN,
    ),
    Kernel(
        "ExpertsNBits",
        "many_gate_up",
        H100,
        {f"4 bits, {PROMPT}": (_experts(8192, FOUR), 2180)},
        (f"4 bits, {PROMPT}",),
        BRAIN,
    ),
]
"""Measured: docs/notebook/kernels.md, quantization.md; a prompt of
HybridAttention by the kernels that any GPU runs is the sum of their times before those of sm_90."""

SAME_CODE = {89: 86}
"""An architecture whose machine code is taken from another one's: of eight kernels registers and shared memory were equal."""

BLOCKS = {
    (op, "attend"): [{"BN": keys, "STAGES": stages, "num_stages": stages} for keys in (64, 32) for stages in (3, 2)]
    for op in ("HybridAttention", "Attention", "BlockAttention")
}
"""Settings that `--blocks` tries, of equal ones the first is taken: kernels whose blocks were measured on sm_90 alone."""


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Start and slope of the line through (floor, time) whose relative errors have the least squares; no start below 0."""
    rows = [(floor / time, 1 / time) for floor, time in points]
    aa, ab, bb = (sum(f(*row) for row in rows) for f in (lambda a, b: a * a, lambda a, b: a * b, lambda a, b: b * b))
    a, b = (sum(column) for column in zip(*rows, strict=True))
    rest = aa * bb - ab * ab
    start = (aa * b - ab * a) / rest if len(points) > 1 and rest > 1e-9 * aa * bb else 0.0
    if start <= 0:
        return 0.0, a / aa
    return start, (a - start * ab) / aa


def errors(kernel: Kernel) -> dict[str, float]:
    """Of each measured call, computed from the others: relative, of a kernel with two calls at least."""
    points = {name: (kernel.on.floor_us(cost), time_us) for name, (cost, time_us) in kernel.calls.items()}
    found = {}
    for name, (floor, time_us) in points.items():
        if others := [point for other, point in points.items() if other != name]:
            start, slow = fitted(others)
            found[name] = (start + slow * floor) / time_us - 1
    return found


@cache
def compiled(op: str, name: str, fields: tuple[tuple[str, Any], ...], arch: int, setting: tuple[Any, ...] = ()) -> Code:
    """A kernel compiled for an architecture, with another setting of its tile."""
    from triton import knobs

    from still_kernels import aot
    from still_kernels.registry import kernels_of
    from still_kernels.tile import TileTable, changed

    kernels = kernels_of(op)
    variant = kernels.variant(**dict(fields))
    build = kernels.build(variant, arch)
    name = name if name in build.tiles else f"{name}_tma"
    made = replace(build, tiles=changed(TileTable(build.tiles), name, dict(setting)).tiles)
    entry, cubins = aot.compile_variant(op, variant, arch, name, made)
    found = entry["kernels"][name]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubins[found["cubin"]])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers = int(re.findall(r"REG:(\d+)", text)[0])
    return Code(registers, found["shared_bytes"], found["num_warps"], found["constexprs"].get("BN", 0))


def predicted(kernel: Kernel, call: str, arch: int, setting: tuple[Any, ...] = ()) -> tuple[float, float, int, int]:
    """Floor and time in microseconds on an architecture, registers and resident warps of the kernel."""
    cost, here, fields = kernel.calls[call][0], GPUS[arch], tuple(kernel.fields.items())
    code = compiled(kernel.op, kernel.kernel, fields, SAME_CODE.get(arch, arch), setting)
    start, slow = fitted([(kernel.on.floor_us(each), time_us) for each, time_us in kernel.calls.values()])

    known = compiled(kernel.op, kernel.kernel, fields, kernel.like, kernel.as_measured)

    def loss(gpu: Gpu, code: Code) -> float:
        """By what a call takes longer than it might: of attention's pairs over products, else one over the warps for each byte, or
        product, that a multiprocessor should have in flight."""
        if kernel.softmax:
            whole, products = gpu.pair_clocks(kernel.softmax, code.keys, code.resident(gpu) // code.warps)
            return whole / products
        return (gpu.copy if here.by_bytes(cost) else gpu.gemm) / (code.resident(gpu) * gpu.processors)

    floor, more = here.floor_us(cost), loss(here, code) / loss(kernel.on, known)
    time_us = start + slow * floor * (more if kernel.softmax else max(1.0, more))
    return floor, time_us, code.registers, code.resident(here)


def best_blocks(kernel: Kernel, arch: int) -> tuple[tuple[Any, ...], float]:
    """Of `BLOCKS` the setting whose computed time is the least, and that time."""
    times = {}
    for setting in BLOCKS[kernel.op, kernel.kernel]:
        key = tuple(setting.items())
        times[key] = predicted(kernel, kernel.shown[0], arch, key)[1]
    best = min(times, key=lambda key: times[key])
    return best, times[best]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print one, row by row: compiling takes minutes."""
    for row in chain((head, ["---"] * len(head)), rows):
        print("| " + " | ".join(row) + " |", flush=True)


def computed(archs: Sequence[int], words: Sequence[str]) -> Iterator[list[str]]:
    """Rows of the table, of calls whose name has one of the words."""
    for kernel in KERNELS:
        for call in kernel.shown:
            name = f"{kernel.op}, {call}"
            if words and not any(word in name for word in words):
                continue
            found = (predicted(kernel, call, arch) for arch in archs)
            yield [name, *(f"{us:,.0f} ({floor:,.0f}; {registers}, {warps})" for floor, us, registers, warps in found)]


def off() -> Iterator[list[str]]:
    """Rows of `--error`."""
    for kernel in KERNELS:
        start, slow = fitted([(kernel.on.floor_us(cost), time_us) for cost, time_us in kernel.calls.values()])
        found = errors(kernel).values()
        error = f"{min(found):+.0%} to {max(found):+.0%}" if found else "one call alone"
        yield [f"{kernel.op}, {kernel.kernel}", str(len(kernel.calls)), f"{start:.1f}", f"{1 / slow:.2f}", error]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", default="80,86,89,100,120", help="comma-separated, 90 for sm_90")
    parser.add_argument("--error", action="store_true", help="of the model on sm_90")
    parser.add_argument("--blocks", action="store_true", help="settings of kernels, and the one that is taken")
    parser.add_argument("words", nargs="*", help="parts of names of calls; default: all")
    options = parser.parse_args()
    archs = [int(arch) for arch in options.arch.split(",")]
    if options.error:
        table(("on sm_90", "calls", "start, us", "share of the floor", "a call from the others"), off())
    elif options.blocks:
        for kernel in (each for each in KERNELS if (each.op, each.kernel) in BLOCKS):
            for arch in archs:
                setting, time_us = best_blocks(kernel, arch)
                print(f"{kernel.op}, {kernel.kernel}, sm_{arch}: {dict(setting)}, {time_us:,.0f} us", flush=True)
    else:
        head = ["computed, us (floor; registers, resident warps)", *(f"sm_{arch}, {GPUS[arch].name}" for arch in archs)]
        table(head, computed(archs, options.words))


if __name__ == "__main__":
    main()
