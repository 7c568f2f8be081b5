#!/usr/bin/env python3
"""Times of the main kernels on GPUs that nobody ran them on, computed from machine code: a Markdown table.

    python tools/predict_times.py [--arch 80,86] [WORD ...]

Each call moves bytes and multiplies; the slower of both at a GPU's rates is its floor. On sm_90 the time of a call is known (`CALLS`), and
so the share that its floor is of it. Elsewhere it is given the same share, less where fewer warps are resident for each byte or product in
flight: warps of a multiprocessor follow from registers, shared memory and threads of the kernel as it is compiled for the architecture.
What is assumed is in `GPUS`: figures of data sheets, of which a copy reaches 0.87 and a GEMM 0.75, as on an H100. WORDs choose calls by
part of their name.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from still_kernels.hybrid_attention.config import HybridAttentionConfig

COPY, GEMM = 0.87, 0.75


@dataclass(frozen=True)
class Gpu:
    """Of one architecture: multiprocessors, bytes/s and FLOP/s (16 bits, dense, summed in float32) of the data sheet, warps and
    bytes of shared memory of a multiprocessor."""

    name: str
    processors: int
    copy: float
    gemm: float
    warps: int
    shared: int


GPUS = {
    80: Gpu("A100 80 GB", 108, 2.04e12, 312e12, 64, 164 << 10),
    86: Gpu("A10", 72, 0.60e12, 125e12, 48, 100 << 10),
    89: Gpu("L40S", 142, 0.864e12, 362e12, 48, 100 << 10),
    90: Gpu("H100", 132, 3.35e12, 989e12, 64, 228 << 10),
    100: Gpu("B200", 148, 8.0e12, 2250e12, 64, 228 << 10),
    120: Gpu("RTX 5090", 170, 1.79e12, 209e12, 48, 100 << 10),
}
H200 = Gpu("H200", 132, 4.8e12, 989e12, 64, 228 << 10)


@dataclass(frozen=True)
class Timed:
    """A call on sm_90: what it costs (bytes, FLOP), microseconds on a GPU, and the kernel that most of them are of.

    like: The architecture whose machine code stands for that, where sm_90 has another kernel now.
    """

    cost: Callable[[], tuple[float, float]]
    time_us: float
    on: Gpu
    op: str
    kernel: str
    fields: dict[str, Any]
    like: int = 90


def _hybrid(tokens: int, batch: int) -> Callable[[], tuple[float, float]]:
    from still_kernels.hybrid_attention.cost import decode_cost, prefill_cost

    layer = HybridAttentionConfig(32, 8, 128, chunk_size=64, salient_per_chunk=4, capacity_tokens=65600)
    return lambda: decode_cost(layer, tokens, batch) if batch else prefill_cost(layer, tokens)


def _linear(outputs: int, inputs: int, bits: float) -> Callable[[], tuple[float, float]]:
    return lambda: (outputs * inputs * bits / 8, 2.0 * outputs * inputs)


def _experts(op: str, batch: int, tokens: int, bits: float) -> Callable[[], tuple[float, float]]:
    """Of Qwen3.5-35B-A3B, 256 experts of which 8 are chosen at random; `bits` of a weight with what its block has."""
    pairs, numbers = 8.0 * batch * tokens, 3 * 2048 * 512
    read = 256 * (1 - (1 - 8 / 256) ** (batch * tokens))
    return lambda: (read * numbers * bits / 8 + 2 * 2 * 2048 * batch * tokens, 2 * pairs * numbers)


LLAMA = {"dtype": "bfloat16", "head_dim": 128, "feature_rows": 128}
BRAIN = {"dtype": "bfloat16"}
FOUR = 4 + 16 / 32 + 4 / 32
CALLS = {
    "HybridAttention, prompt of 65,536": Timed(_hybrid(65536, 0), 8780, H200, "HybridAttention", "attend", LLAMA, 80),
    "HybridAttention, step after 65,536": Timed(_hybrid(65536, 1), 28.1, H200, "HybridAttention", "decode", LLAMA),
    "the same, 8 sequences": Timed(_hybrid(65536, 8), 146.3, H200, "HybridAttention", "decode", LLAMA),
    "MatMulNBits, 4 bits, 28,672 x 4,096, a token": Timed(
        _linear(28672, 4096, FOUR), 25.9, H200, "MatMulNBits", "few", {"span": 2}
    ),
    "Experts, bfloat16, a token": Timed(_experts("Experts", 1, 1, 16), 22.3, GPUS[90], "Experts", "few_gate_up", BRAIN),
    "Experts, bfloat16, 8,192 tokens": Timed(
        _experts("Experts", 1, 8192, 16), 2056, GPUS[90], "Experts", "many_gate_up", BRAIN, 80
    ),
    "ExpertsNBits, 4 bits, a token": Timed(
        _experts("ExpertsNBits", 1, 1, FOUR), 13.6, GPUS[90], "ExpertsNBits", "few_codes_gate_up", BRAIN
    ),
    "ExpertsNBits, 4 bits, 8,192 tokens": Timed(
        _experts("ExpertsNBits", 1, 8192, FOUR), 2611, GPUS[90], "ExpertsNBits", "many_gate_up", BRAIN
    ),
}
"""Measured: docs/notebook/kernels.md and quantization.md; a prompt of HybridAttention by the kernels that any GPU runs."""


@cache
def resident_warps(op: str, kernel: str, fields: tuple[tuple[str, Any], ...], arch: int) -> tuple[int, int]:
    """Registers of a thread of a kernel compiled for an architecture, and warps of it that a multiprocessor holds."""
    from triton import knobs

    from still_kernels.aot import compile_variant
    from still_kernels.registry import kernels_of

    kernels = kernels_of(op)
    variant = kernels.variant(**dict(fields))
    name = kernel if kernel in kernels.build(variant, arch).tiles else f"{kernel}_tma"
    entry, cubins = compile_variant(op, variant, arch, only=name)
    found = entry["kernels"][name]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubins[found["cubin"]])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, warps = int(re.findall(r"REG:(\d+)", text)[0]), found["num_warps"]
    of_warp = -(-registers * 32 // 256) * 256  # registers are given to warps by 256
    gpu = GPUS[arch]
    programs = min(65536 // of_warp // warps, gpu.shared // (found["shared_bytes"] + 1024), gpu.warps // warps)
    return registers, programs * warps


def predicted(call: Timed, arch: int) -> tuple[float, float, int, int]:
    """Floor and time in microseconds on an architecture, registers and resident warps of the main kernel."""
    size_bytes, flop = call.cost()

    def floor(gpu: Gpu) -> float:
        return 1e6 * max(size_bytes / (COPY * gpu.copy), flop / (GEMM * gpu.gemm))

    here = GPUS[arch]
    by_bytes = size_bytes / (COPY * here.copy) > flop / (GEMM * here.gemm)

    def in_flight(gpu: Gpu, warps: int) -> float:
        """Warps for each byte, or product, that a multiprocessor should have in flight."""
        return warps * gpu.processors / (gpu.copy if by_bytes else gpu.gemm)

    fields = tuple(call.fields.items())
    registers, warps = resident_warps(call.op, call.kernel, fields, arch)
    known = in_flight(call.on, resident_warps(call.op, call.kernel, fields, call.like)[1])
    share = floor(call.on) / call.time_us * min(1.0, in_flight(here, warps) / known)
    return floor(here), floor(here) / share, registers, warps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", default="80,86,89,100,120", help="comma-separated, 90 for sm_90")
    parser.add_argument("words", nargs="*", help="parts of names of calls; default: all")
    options = parser.parse_args()
    archs = [int(arch) for arch in options.arch.split(",")]
    print(
        "| computed, us (floor; registers, resident warps) | "
        + " | ".join(f"sm_{a}, {GPUS[a].name}" for a in archs)
        + " |"
    )
    print("|---" * (len(archs) + 1) + "|")
    for name, call in CALLS.items():
        if options.words and not any(word in name for word in options.words):
            continue
        found = (predicted(call, arch) for arch in archs)
        cells = (f"{time:,.0f} ({floor:,.0f}; {registers}, {warps})" for floor, time, registers, warps in found)
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
