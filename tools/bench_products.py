"""Times the kernels of still::MatMulNBits on a GPU: `python tools/bench_products.py [-o FILE.json]`.

Decode of 1 to 8 rows over the products of Llama-3.1-8B in 4, 8 and 16 bits, with several tiles, beside a copy and cuBLAS; prefill of 2,048
rows. Steps run in CUDA graphs and walk through more weights than the L2 cache holds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from still_kernels.matmul_nbits.gluon_decode import decode_kernel
from still_kernels.matmul_nbits.triton_prefill import dequantize_kernel, multiply_kernel

PRODUCTS = {"qkv": (6144, 4096), "out": (4096, 4096), "gate+up": (28672, 4096), "down": (4096, 14336), "head": (128256, 4096)}
"""Outputs and inputs of Llama-3.1-8B's products."""
TILES = ((16, 8, 4), (16, 8, 2), (16, 4, 4), (32, 8, 2), (32, 8, 4), (32, 4, 2), (32, 4, 4), (64, 8, 1), (64, 4, 2), (64, 8, 2), (16, 16, 2), (32, 16, 1))
"""Outputs of a program, warps that split the inputs, units of a step."""
PREFILL = ((128, 256, 64, 3, 8), (128, 256, 64, 4, 8), (256, 128, 64, 3, 8), (128, 128, 64, 4, 8), (128, 128, 64, 4, 4))
"""BM, BN, BK, stages, warps."""
WALK_BYTES = 200 << 20
BLOCK = 32


class Weight:
    """A random weight [N, K] in blocks."""

    def __init__(self, outputs: int, inputs: int, bits: int, zero_points: bool, device: str = "cuda") -> None:
        def words(*shape: int) -> Tensor:
            return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=device)

        self.bits, self.outputs, self.inputs = bits, outputs, inputs
        self.zero_points: Tensor | None = None
        self.scales: Tensor | None = None
        if bits == 16:
            self.blocks = (torch.randn(outputs, inputs, device=device) / 64).half().view(torch.int32)
            return
        self.blocks = words(outputs, inputs * bits // 32)
        blocks = inputs // BLOCK
        self.scales = (torch.rand(outputs, blocks, device=device) / 2**bits / 8).half()
        self.scales *= torch.randint(0, 2, (outputs, blocks), device=device) * 2 - 1
        if zero_points:
            self.zero_points = words(outputs, -(-blocks * bits // 32))

    @property
    def size_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.blocks, self.scales, self.zero_points) if x is not None)

    def dense(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Rounded to half precision, as kernels have it."""
        if self.bits == 16:
            return self.blocks.view(torch.float16).to(dtype)
        assert self.scales is not None
        shifts = torch.arange(0, 32, self.bits, device=self.blocks.device, dtype=torch.int32)
        most = (1 << self.bits) - 1
        codes = ((self.blocks[..., None] >> shifts) & most).view(self.outputs, -1, BLOCK)
        zero: Tensor | int = 1 << (self.bits - 1)
        if self.zero_points is not None:
            zero = ((self.zero_points[..., None] >> shifts) & most).view(self.outputs, -1)[:, : codes.shape[1], None]
        value = (codes - zero).float() * self.scales.float()[..., None]
        return value.half().view(self.outputs, self.inputs).to(dtype)


def decode(x: Tensor, weight: Weight, output: Tensor, tile: tuple[int, int, int], pdl: int = 0, warm: bool = False) -> None:
    rows = x.shape[0]
    bn, splits, units = tile
    grid = (-(-rows // 8), -(-weight.outputs // bn), 1)
    words = 0 if weight.zero_points is None else weight.zero_points.shape[1]
    options: dict[str, Any] = {"num_warps": splits, "launch_pdl": True} if pdl else {"num_warps": splits}
    arguments = (x, weight.blocks, weight.scales, weight.zero_points, output, rows, weight.outputs, weight.inputs, words)
    constants = {"BITS": weight.bits, "BLOCK": BLOCK, "BN": bn, "SPLITS": splits, "UNITS": units, "PDL": pdl}
    if warm:
        decode_kernel.warmup(*arguments, **constants, **options, grid=grid)
    else:
        decode_kernel[grid](*arguments, **constants, **options)


def dequantize(weight: Weight, dense: Tensor, first: int, count: int, bn: int = 16, bw: int = 32) -> None:
    grid = (-(-weight.blocks.shape[1] // bw), -(-count // bn), 1)
    words = 0 if weight.zero_points is None else weight.zero_points.shape[1]
    dequantize_kernel[grid](
        weight.blocks, weight.scales, weight.zero_points, dense, first, count, weight.inputs, words,
        BITS=weight.bits, BLOCK=BLOCK, BN=bn, BW=bw, num_warps=4,
    )  # fmt: skip


def multiply(x: Tensor, dense: Tensor, output: Tensor, first: int, count: int, tile: tuple[int, int, int, int, int]) -> None:
    bm, bn, bk, stages, warps = tile
    rows, outputs = output.shape
    grid = (-(-rows // bm) * -(-count // bn), 1, 1)
    multiply_kernel[grid](
        x, dense, output, first, count, rows, outputs, x.shape[1],
        BM=bm, BN=bn, BK=bk, GROUP=8, STAGES=stages, ALIGNED=int(outputs % 8 == 0), num_warps=warps, num_stages=stages,
    )  # fmt: skip


def timed(run: Callable[[int], Any], count: int, replays: int = 5) -> float:
    """Seconds of one of `count` calls in a CUDA graph: the best of the replays' thirds."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            run(i)
    graph.replay()
    best = float("inf")
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / replays / count)
    return best


def error(got: Tensor, expected: Tensor) -> float:
    """Relative, of the Frobenius norm; infinite with a NaN."""
    value = ((got.double() - expected).norm() / expected.norm()).item()
    return value if value == value else float("inf")


def check() -> bool:
    """Small products against float64."""
    worst: dict[str, float] = {}
    cases = [(4, True), (4, False), (8, True), (8, False), (16, False)]
    for bits, zero in cases:
        for outputs, inputs in ((77, 288), (40, 1184), (129, 4128), (16, 32)):
            weight = Weight(outputs, inputs, bits, zero)
            exact = weight.dense()
            for rows in (1, 2, 3, 5, 7, 8, 9, 17):
                x = torch.randn(rows, inputs, device="cuda").half()
                for tile in TILES:
                    output = torch.full((rows, outputs), float("nan"), dtype=torch.float16, device="cuda")
                    decode(x, weight, output, tile)
                    name = f"decode {bits} bits {'zero points ' if zero else ''}{tile}"
                    worst[name] = max(worst.get(name, 0.0), error(output, x.double() @ exact.T))
            for rows in (9, 63, 129):
                x = torch.randn(rows, inputs, device="cuda").half()
                dense = torch.full((outputs, inputs), float("nan"), dtype=torch.float16, device="cuda")
                if bits == 16:
                    dense = weight.blocks.view(torch.float16)
                else:
                    dequantize(weight, dense, 0, outputs)
                    name = f"dequantize {bits} bits {'zero points' if zero else ''}"
                    worst[name] = max(worst.get(name, 0.0), error(dense, exact))
                for tile in PREFILL:
                    if outputs % 8 and tile[1] == 256:
                        continue
                    output = torch.full((rows, outputs), float("nan"), dtype=torch.float16, device="cuda")
                    multiply(x, dense, output, 0, outputs, tile)
                    name = f"multiply {tile}"
                    worst[name] = max(worst.get(name, 0.0), error(output, x.double() @ exact.T))
    bad = {name: value for name, value in worst.items() if not value < 2e-3}
    print(f"checked {len(worst)} kernels, worst relative error {max(worst.values()):.2e}, wrong: {bad or 'none'}", flush=True)
    return not bad


def _warm(job: tuple[int, bool, tuple[int, int, int], int]) -> str:
    bits, zero, tile, pdl = job
    try:
        weight = Weight(64, 256, bits, zero)
        x = torch.randn(8, 256, device="cuda").half()
        decode(x, weight, torch.empty(8, 64, dtype=torch.float16, device="cuda"), tile, pdl, warm=True)
    except Exception as failure:
        return f"{job}: {type(failure).__name__}: {failure}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--parts", default="check,prefill,decode")
    options = parser.parse_args()
    begin = time.monotonic()
    torch.manual_seed(0)
    jobs = [(bits, zero, tile, pdl) for bits in (4, 8, 16) for zero in ((True, False) if bits < 16 else (False,)) for tile in TILES for pdl in (0, 1)]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        failures = [text for text in pool.map(_warm, jobs) if text]
    print(f"compiled {len(jobs)} kernels, {time.monotonic() - begin:.0f} s", *failures[:5], sep="\n", flush=True)
    results: list[dict[str, Any]] = []

    def keep(**what: Any) -> None:
        results.append(what)
        if options.output:
            options.output.write_text(json.dumps(results))

    parts = options.parts.split(",")
    for part, run in (("check", check), ("copy", lambda: measure_copy(keep)), ("prefill", lambda: measure_prefill(keep)), ("decode", lambda: measure_decode(keep, begin + options.seconds))):
        if part in (*parts, "copy"):
            try:
                run()
            except Exception as failure:
                print(f"{part} failed: {type(failure).__name__}: {str(failure)[:600]}", flush=True)
            print(f"{part}: {time.monotonic() - begin:.0f} s", flush=True)
    return 0


RATES: dict[int, float] = {}


def measure_copy(keep: Callable[..., None]) -> None:
    """Rates of copies, by bytes read and written."""
    for size in (4 << 20, 9 << 20, 18 << 20, 36 << 20, 72 << 20, 144 << 20, 1 << 30):
        count = max(2, -(-2 * WALK_BYTES // size))
        buffers = [(torch.empty(size // 2, dtype=torch.uint8, device="cuda"), torch.empty(size // 2, dtype=torch.uint8, device="cuda")) for _ in range(min(count, 64))]
        RATES[size] = size / timed(lambda i: buffers[i % len(buffers)][0].copy_(buffers[i % len(buffers)][1]), count)
        keep(part="copy", size=size, rate=RATES[size])
    print("copy, TB/s by MB:", {size >> 20: round(rate / 1e12, 2) for size, rate in RATES.items()}, flush=True)


def measure_prefill(keep: Callable[..., None]) -> None:
    for name, rows in itertools.product(("qkv", "out", "gate+up", "down"), (2048,)):
        outputs, inputs = PRODUCTS[name]
        weight = Weight(outputs, inputs, 4, True)
        x = torch.randn(rows, inputs, device="cuda").half()
        dense = torch.empty(outputs, inputs, dtype=torch.float16, device="cuda")
        output = torch.empty(rows, outputs, dtype=torch.float16, device="cuda")
        flop = 2.0 * rows * outputs * inputs
        own = timed(lambda i: torch.mm(x, dense.T, out=output), 4, 3)
        unpacked = {}
        for bn, bw in ((16, 32), (8, 64), (4, 128), (32, 32)):
            unpacked[bn, bw] = timed(lambda i: dequantize(weight, dense, 0, outputs, bn, bw), 4, 3)
        fast = min(unpacked.values())
        line = {}
        for tile in PREFILL:
            seconds = timed(lambda i: multiply(x, dense, output, 0, outputs, tile), 4, 3)
            keep(part="prefill", product=name, rows=rows, tile=tile, seconds=seconds, dequantize=fast, cublas=own)
            line[tile] = f"{flop / seconds / 1e12:.0f} ({own / (seconds + fast):.2f})"
        print(f"prefill {name} {rows}: cuBLAS {flop / own / 1e12:.0f} TFLOPS, dequantize us {({k: round(v * 1e6) for k, v in unpacked.items()})}, "
              f"ours TFLOPS (of cuBLAS with dequantize) {line}", flush=True)  # fmt: skip


def measure_decode(keep: Callable[..., None], until: float) -> None:
    big = RATES[max(RATES)]
    for name, bits in itertools.product(("out", "gate+up", "qkv", "down", "head"), (4, 16, 8)):
        if (name == "head") != (bits == 8) and bits != 16 and name == "head":
            continue
        outputs, inputs = PRODUCTS[name]
        one = Weight(outputs, inputs, bits, bits == 4)
        count = max(1, -(-WALK_BYTES // one.size_bytes))
        weights = [one, *[Weight(outputs, inputs, bits, bits == 4) for _ in range(count - 1)]]
        dense = [torch.empty(outputs, inputs, dtype=torch.float16, device="cuda") for _ in range(max(1, -(-WALK_BYTES // (2 * outputs * inputs))))]
        calls = max(count, 8) if name != "head" else 2
        for rows in (1, 2, 4, 8):
            if time.monotonic() > until:
                print("out of time", flush=True)
                return
            x = torch.randn(rows, inputs, device="cuda").half()
            output = torch.empty(rows, outputs, dtype=torch.float16, device="cuda")
            found = {}
            for tile in TILES:
                if rows in (2, 4) and tile not in TILES[:8:2]:
                    continue
                found[tile] = timed(lambda i: decode(x, weights[i % count], output, tile), calls, 4)
                keep(part="decode", product=name, bits=bits, rows=rows, tile=tile, seconds=found[tile], bytes=one.size_bytes)
            best = min(found, key=lambda tile: found[tile])
            dependent = timed(lambda i: decode(x, weights[i % count], output, best, 1), calls, 4)
            own = timed(lambda i: torch.mm(x, dense[i % len(dense)].T, out=output), calls, 4)
            keep(part="peer", product=name, bits=bits, rows=rows, cublas=own, dependent=dependent)
            same = min(RATES.items(), key=lambda item: abs(item[0] - one.size_bytes))[1]
            ranked = " ".join(f"{'/'.join(map(str, t))}:{s * 1e6:.1f}" for t, s in sorted(found.items(), key=lambda item: item[1])[:6])
            rate = one.size_bytes / found[best]
            print(f"{name:8s} {bits:2d} bits {rows} rows: {found[best] * 1e6:6.1f} us {rate / 1e12:.2f} TB/s = {rate / big:.2f} of the copy, {rate / same:.2f} of a "
                  f"copy as large; PDL {dependent * 1e6:.1f}; cuBLAS fp16 {own * 1e6:.1f} us; {ranked}", flush=True)  # fmt: skip
        del weights, dense, one


if __name__ == "__main__":
    sys.exit(main())
