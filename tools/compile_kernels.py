#!/usr/bin/env python3
"""Compile the kernels of the GPU tests and benchmarks into Triton's cache, on all cores and without a GPU.

  python tools/compile_kernels.py [--arch 90] [--jobs N] [WORD ...]

First on a GPU machine: what follows finds its kernels compiled, which one process would do one by one. Anywhere else: what does not
compile with the installed Triton, or needs more shared memory than the architecture has, is named, and the exit code is 1. WORDs
choose among the cases by part of their name. Kernels pass through Triton's own just-in-time path, with a driver that only knows the
architecture; TRITON_CACHE_DIR says where the cache is.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from still_kernels.hybrid_attention.plan.tiles import HEAD_DIMS

ROOT = Path(__file__).parents[1]
CASES = ROOT / "tests/still_kernels/hybrid_attention/triton_cases.py"
LLAMA: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
NARROW = {
    "no salient": ("float16", "bfloat16"),
    "all salient": ("float16", "bfloat16"),
    "promoting": ("bfloat16",),
    "many parts, group": ("bfloat16",),
    "packed, folding": ("bfloat16",),
    "many features": ("bfloat16",),
    **{f"head size {size}": ("bfloat16",) for size in HEAD_DIMS},
}
"""Cases that the GPU tests run in 16 bits too."""


class Driver:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def load_cases() -> Any:
    """The module of the cases, by path: tests are not installed."""
    sys.path.append(str(ROOT))  # what cases share
    spec = importlib.util.spec_from_file_location("triton_cases", CASES)
    assert spec and spec.loader
    module = sys.modules["triton_cases"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_layer(arch: int, name: str, dtype_name: str) -> str:
    """Compile what a case, or a Llama-3.1-8B layer of the scope `name`, launches; returns what went wrong, or nothing."""
    from triton.runtime import driver

    from still_kernels import launcher
    from still_kernels.common.cuda_function import CudaFunction
    from still_kernels.hybrid_attention import launch
    from still_kernels.hybrid_attention.meaning.inputs import Inputs
    from still_kernels.hybrid_attention.plan.tiles import tile_table
    from still_kernels.packing import Packing
    from still_kernels.tile import SHARED_BYTES

    driver.set_active(Driver(arch))  # type: ignore[arg-type]
    cases = load_cases()
    found: list[str] = []

    class Compiler(launcher.Launcher):
        def launch(self, launch: launcher.PreparedLaunch, values: list[Any], variant: object | None) -> None:
            arguments = dict(zip(launch.function.arg_names, values, strict=True))
            options = launch.tile.options()
            try:
                if isinstance(launch.function, CudaFunction):
                    launch.function.compiled(arch, arguments)
                    return
                shared = launch.function.run(grid=launch.grid, warmup=True, **arguments, **options).metadata.shared
            except Exception as failure:  # of any stage of the compiler
                found.append(f"{launch.name}: {type(failure).__name__}: {str(failure).strip()[-300:]}")
                return
            if shared > SHARED_BYTES[arch]:
                found.append(f"{launch.name}: {shared} bytes of shared memory, sm_{arch} has {SHARED_BYTES[arch]}")

    launcher.Launcher = Compiler  # type: ignore[misc]
    layer = cases.CASES.get(name) or cases.Case(
        {**LLAMA, "chunk_size": 64, "feature_dim": 128, "select_scope": name}, ((3, [3, 3]), cases.STEP)
    )
    config, dtype = layer.config(), getattr(torch, dtype_name)
    table = tile_table(arch, config.head_dim, config.chunk_size, config.projection_dim, dtype == torch.float32)
    state = cases.HybridAttentionState.empty(config, 2, dtype)
    weights = [torch.zeros(config.num_heads, config.projection_dim, config.head_dim, dtype=dtype) for _ in "qk"]
    factor = None if config.window_factor is None else torch.ones(config.num_heads)
    for tokens in sorted({min(tokens, 3) for tokens, _ in layer.calls}):
        shape = (2 * tokens,) if layer.packed else (2, tokens)
        query, key = (
            torch.zeros(*shape, n, config.head_dim, dtype=dtype) for n in (config.num_heads, config.num_kv_heads)
        )
        gate = query if config.gate == "channel" else None
        inputs = Inputs(query, key, key, gate, *weights, window_factor=factor)
        if layer.packed:
            start, rows = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
            launch.launch_hybrid_attention(inputs, config, state, query, Packing(start, rows, tokens), table)
            continue
        for kind in (torch.int32, torch.int64):
            present = torch.zeros(2, dtype=torch.int64)
            given = dataclasses.replace(inputs, new_tokens=torch.zeros(2, dtype=kind))
            launch.launch_hybrid_attention(given, config, state, query, table=table, present_length=present)
    return "; ".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", type=int, default=90, help="compute capability, 90 for sm_90")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("words", nargs="*", help="parts of names of cases; default: all")
    options = parser.parse_args()
    work = [(scope, "bfloat16") for scope in ("q_head", "kv_group_max")]
    for name in load_cases().CASES:
        work += [(name, dtype) for dtype in ("float32", *NARROW.get(name, ()))]
    work = [item for item in work if not options.words or any(word in item[0] for word in options.words)]
    begin, failed = time.monotonic(), 0
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(compile_layer, options.arch, *item) for item in work]
        for item, future in zip(work, futures, strict=True):
            found = future.result()
            failed += bool(found)
            if found:
                print(f"{', '.join(item)}: {found}", flush=True)
    print(f"{len(work) - failed} of {len(work)} layers compile for sm_{options.arch}, {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
