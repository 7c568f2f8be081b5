#!/usr/bin/env python3
"""Both kernels of attend on a GPU: every case against float64 in a process of its own, which may hang, then times.

  python tools/check_attend.py [--jobs 6] [--timeout 120] [--no-times | --no-cases] [WORD ...]

One line a case: greatest error relative above 1, error by Frobenius norm, what is wrong. Times are of a CUDA graph of the launches of one
layer of Llama-3.1-8B's geometry, bfloat16: hot back to back, cool with a pause before each. WORDs choose cases by part of their name.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

CASES = Path(__file__).parents[1] / "tests/still_kernels/attend_cases.py"
KERNELS = ("tma", "triton")
LIMITS = {"bfloat16": 3e-2, "float16": 4e-3}
NORMS = {"bfloat16": 4e-3, "float16": 1e-3}


def load_cases() -> Any:
    """The module of the cases, by path: tests are not installed."""
    spec = importlib.util.spec_from_file_location("attend_cases", CASES)
    assert spec and spec.loader
    module = sys.modules["attend_cases"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def errors(kernel: str, name: str, timeout_s: float) -> dict[str, float] | str:
    """Of one case, or what became of its process."""
    command = [sys.executable, "-W", "ignore", str(CASES), kernel, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"no end within {timeout_s:.0f} s"
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        return f"exit code {done.returncode}: " + " | ".join(lines[-3:])[-400:]
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])[name]
    return found


def verdict(found: dict[str, float] | str, dtype: str) -> str:
    """What is wrong with a result, or "ok"."""
    if isinstance(found, str):
        return found
    wrong = [f"{what} {found[what]:.0f}" for what in ("wrong", "outside", "repeats") if found[what]]
    wrong += ["error"] if found["error"] > LIMITS[dtype] else []
    wrong += ["norm"] if found["norm"] > NORMS[dtype] else []
    return ", ".join(wrong) or "ok"


def check(names: list[str], jobs: int, timeout_s: float) -> int:
    """Print a line for each case; returns how many fail."""
    cases = load_cases().CASES
    work = [(kernel, name) for name in names for kernel in KERNELS]
    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        futures = {item: pool.submit(errors, *item, timeout_s) for item in work}
        for name in names:
            line = f"{name:30}"
            for kernel in KERNELS:
                found = futures[kernel, name].result()
                said = verdict(found, cases[name].dtype)
                failed += said != "ok"
                numbers = "" if isinstance(found, str) else f"{found['error']:.1e} {found['norm']:.1e} "
                line += f" {kernel} {numbers}{said};"
            print(line, flush=True)
    print(f"{len(work) - failed} of {len(work)} right", flush=True)
    return failed


def time_kernel(kernel: str, tokens: int, gate: bool) -> tuple[float, float, Any, str]:
    """(hot, cool) ms of a layer, its output, and what the compiler used."""
    import torch

    cases = load_cases()
    case = cases.Case(counts=(tokens,), heads=32, kv_heads=8, gate=gate)
    data = cases.make(case, "cuda")
    output, _ = cases.guarded_output(data)
    launches = cases.prepare(data, kernel, output)
    compiled = launches[0]()
    torch.cuda.synchronize()
    used = f"{compiled.n_regs} registers, {compiled.n_spills} spilled, {compiled.metadata.shared} B shared"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    hot, cool = hot_and_cool(graph)
    return hot, cool, output, used


def hot_and_cool(graph: Any) -> tuple[float, float]:
    """Median ms of a graph's replays, back to back and with a pause before each."""
    import torch

    times: dict[bool, list[float]] = {False: [], True: []}
    for cool in (True, False):
        for i in range(40 if cool else 200):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
            if cool:
                torch.cuda.synchronize()
                time.sleep(0.05)
            begin.record()
            graph.replay()
            end.record()
            if cool or i % 20 == 19:
                torch.cuda.synchronize()
            if cool or i >= 100:
                end.synchronize()
                times[cool].append(begin.elapsed_time(end))
    hot, cool_ms = (sorted(times[cool])[len(times[cool]) // 2] for cool in (False, True))
    return hot, cool_ms


def times() -> None:
    """Print the times of both kernels, and how far apart they are."""
    import torch

    print(
        f"\n{torch.cuda.get_device_name()}, ms       " + "".join(f"{k + ' hot':>14}{k + ' cool':>14}" for k in KERNELS)
    )
    for gate in (True, False):
        for tokens in (8192, 32768, 65536):
            found = {kernel: time_kernel(kernel, tokens, gate) for kernel in KERNELS}
            line = f"{tokens:6} {'gate' if gate else 'no gate':8}          "
            line += "".join(f"{found[k][0]:14.3f}{found[k][1]:14.3f}" for k in KERNELS)
            ours, theirs = (found[k][2].double() for k in KERNELS)
            print(f"{line}   difference {((ours - theirs).norm() / theirs.norm()).item():.1e}", flush=True)
    for kernel in KERNELS:
        print(f"{kernel}: {found[kernel][3]}")


def time_calls() -> None:
    """Print the times of whole calls, in a CUDA graph, by which kernel of attend they take."""
    import torch

    from still_kernels.hybrid_attention import launch
    from still_kernels.hybrid_attention.work import WORK
    from still_kernels.tile import changed

    print("\nprefill of a layer, ms   " + "".join(f"{k + ' hot':>14}{k + ' cool':>14}" for k in KERNELS))
    for context in (8192, 32768, 65536):
        layer = WORK.layer(WORK.sizes, "q_head", context)
        work = WORK.work(layer, WORK.kinds(context, (1,))[0], torch.bfloat16, "cuda")
        table = launch.device_table(layer, torch.device("cuda"), False)
        line = f"{context:6}                   "
        for setting in ({}, {"attend_programs": 0}):
            state, output, own = work.state(), torch.empty_like(work.output), changed(table, "attend", setting)
            run = partial(work.launch, state, output, own)
            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            line += "".join(f"{ms:14.3f}" for ms in hot_and_cool(graph))
        print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=6, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of one case")
    parser.add_argument("--no-times", action="store_true", help="cases only")
    parser.add_argument("--no-cases", action="store_true", help="times only")
    parser.add_argument("--time-now", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="parts of names of cases; default: all")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.time_now:
        times()
        time_calls()
        return 0
    failed = 0
    if not options.no_cases:
        words = options.words
        names = [name for name in load_cases().CASES if not words or any(word in name for word in words)]
        failed = check(names, options.jobs, options.timeout)
    if not options.no_times:
        try:
            subprocess.run([sys.executable, "-W", "ignore", __file__, "--time-now"], timeout=240, check=True)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as failure:
            print(f"times: {failure}")
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
