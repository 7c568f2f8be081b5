#!/usr/bin/env python3
"""Where the time of a decode step goes, on a GPU: Llama-3.1-8B geometry, bf16, per layer of a CUDA graph.

  python tools/profile_decode.py                    time, floor and error by context, batch and scope; plain and promoting
  python tools/profile_decode.py --phases           timeline of the programs by role, from the multiprocessors' clocks
  python tools/profile_decode.py --ncu              the command that shows stalls by source line

About 20 s each with the default sizes, most of it compiling. Every state of a graph is its own and their sum is several times the
L2 cache, so that no step finds its cache there. Other block sizes: python -m still_kernels.tune HybridAttention --kernels decode.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from still_kernels import bench, launcher
from still_kernels.hybrid_attention import launch
from still_kernels.hybrid_attention.plan import PLAN
from still_kernels.hybrid_attention.variants import plan_constants
from still_kernels.hybrid_attention.work import WORK as OP
from still_kernels.tile import TileTable
from still_kernels.work import CHECK_LIMIT, states_of_step

COPY_RATE = 4.2e12  # bytes/s read and written, measured on an H200


@dataclass
class Step:
    """A decode step of several layers: `run` launches them, the tensors stay alive with it."""

    run: Callable[[], None]
    layers: int
    size_bytes: float
    error: float


def make_step(context: int, batch: int, scope: str, promoting: bool) -> Step:
    """Layers with random states at `context` tokens, one fewer unless the step promotes."""
    config = OP.layer(OP.sizes, scope, context)
    kind = next(k for k in OP.kinds(context, (batch,)) if k.tokens == 1 and promoting == ("promoting" in k.name))
    work = OP.work(config, kind, torch.bfloat16, "cuda")
    states = [work.state() for _ in range(min(24, states_of_step(work)))]

    def run() -> None:
        for state in states:
            work.run(state)

    return Step(run, len(states), work.size_bytes, bench.error_of(work))


def capture(step: Step) -> torch.cuda.CUDAGraph:
    """The step as a CUDA graph."""
    step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    return graph


def time_us(step: Step) -> float:
    """Median time of a layer."""
    graph = capture(step)
    return bench.median_s(graph.replay, 30) / step.layers * 1e6


def line(context: int, batch: int, scope: str, promoting: bool) -> str:
    """One measured row."""
    what = f"{scope:14}{context:8}{batch:4} {'promoting' if promoting else 'plain':10}"
    step = make_step(context, batch, scope, promoting)
    if not step.error < CHECK_LIMIT[torch.bfloat16]:
        return f"{what} CHECK FAILED, error {step.error:.1e}"
    time, floor = time_us(step), step.size_bytes / COPY_RATE * 1e6
    return f"{what}{time:9.1f} us{floor:8.1f} floor{floor / time:6.0%}{step.error:10.1e}"


@contextmanager
def traced(step: Step, batch: int) -> Iterator[list[Tensor]]:
    """Launches within get a trace each: int64 [programs, 8]."""
    traces = [torch.zeros(1 << 16, 8, dtype=torch.int64, device="cuda") for _ in range(step.layers)]
    following = itertools.cycle(traces)
    original = launcher.Launcher.launch

    def call(self: launcher.Launcher, made: launcher.PreparedLaunch, values: list[Any], variant: object) -> None:
        if made.name == "decode":
            values[made.function.arg_names.index("p_trace")] = next(following)
        original(self, made, values, variant)

    with mock.patch.object(launcher.Launcher, "launch", call):
        yield traces


def roles(config: Any, table: TileTable, batch: int, slots: int) -> tuple[list[str], int]:
    """Role of each program along x, and the number of select heads."""
    heads, select = config.num_heads, config.select_heads
    constants = plan_constants(config, table)
    slices, window = constants["value_slices"], constants["window_parts"]
    call = launch.call_of(config, torch.bfloat16, table, batch, 1, slots)
    splits = int(PLAN.evaluate(call).arguments["NS"])
    return (["slice"] * slices + ["window"] * window + ["fresh"]) * (heads // select) + ["split"] * splits, select


def phases(context: int, batch: int, scope: str, promoting: bool) -> str:
    """Timeline of one layer in the middle of the graph: by role, when programs start, how long they take, who merges."""
    step = make_step(context, batch, scope, promoting)
    config = OP.layer(OP.sizes, scope, context)
    table = launch.device_table(config, torch.device("cuda"), False)
    names, select = roles(config, table, batch, config.slots_for(config.capacity_tokens or context))
    with traced(step, batch) as traces:
        graph = capture(step)
    for _ in range(5):
        graph.replay()
    for trace in traces:
        trace.zero_()
    graph.replay()
    torch.cuda.synchronize()
    count = len(names) * select * batch
    rows = [trace[:count].cpu() for trace in traces]
    middle = rows[len(rows) // 2]
    clock, start, end = middle[:, :4].double(), middle[:, 4].double(), middle[:, 5].double()
    last = torch.where(clock[:, 3] > clock[:, 0], clock[:, 3], clock[:, 2])
    per_us = float((last - clock[:, 0]).sum() / (end - start).sum().clamp_min(1)) * 1e3
    spans = [(float(row[:, 4].min()), float(row[:, 5].max())) for row in rows]
    gaps = [(b[0] - a[1]) * 1e-3 for a, b in itertools.pairwise(spans)]
    text = [
        f"{scope}, {context} tokens, batch {batch}, {'promoting' if promoting else 'plain'}: {count} programs, "
        f"{per_us / 1e3:.2f} GHz, first start to last end {statistics.median(b - a for a, b in spans) * 1e-3:.1f} us, "
        f"from one layer's last end to the next one's first start {statistics.median(gaps):.1f} us (with clocks, which cost some)",
        f"{'role':8}{'programs':>9}{'start us':>18}{'work us':>18}{'arrive us':>18}{'merge us':>18}{'end us':>18}   (median, most)",
    ]
    zero = start.min()
    role = [names[i % len(names)] for i in range(count)]
    for name in dict.fromkeys(names):
        pick = torch.tensor([r == name for r in role])
        merged = pick & (clock[:, 3] > clock[:, 0])
        columns = [
            (start[pick] - zero) * 1e-3,
            (clock[pick, 1] - clock[pick, 0]) / per_us,
            (clock[pick, 2] - clock[pick, 1]) / per_us,
            (clock[merged, 3] - clock[merged, 2]) / per_us,
            (end[pick] - zero) * 1e-3,
        ]
        cells = [f"{x.median():8.2f} {x.max():8.2f}" if x.numel() else "-" for x in columns]
        text.append(f"{name:8}{int(pick.sum()):9}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(text)


def main() -> int:
    """Command line; exit code 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--context", type=bench._numbers, default=[8192, 65536])
    parser.add_argument("--batch", type=bench._numbers, default=[1, 8])
    parser.add_argument("--scope", default="q_head,kv_group_max")
    parser.add_argument("--phases", action="store_true", help="timeline by role in place of times")
    parser.add_argument("--ncu", action="store_true", help="print the Nsight Compute command")
    parser.add_argument("--once", action="store_true", help="launch without a graph, for Nsight Compute")
    options = parser.parse_args()
    if options.ncu:
        print(
            "ncu --clock-control none --set full --import-source on -k regex:decode -s 3 -c 1 -o decode python "
            "tools/profile_decode.py --once --context 8192 --batch 1 --scope q_head\n"
            "ncu -i decode.ncu-rep --page details; ncu -i decode.ncu-rep --page source --csv --print-details all"
        )
        return 0
    if not torch.cuda.is_available():
        print("error: no CUDA device; decode is profiled on the GPU it runs on.", file=sys.stderr)
        return 2
    cases = itertools.product(options.scope.split(","), options.context, options.batch)
    for scope, context, batch in cases:
        if options.once:
            step = make_step(context, batch, scope, False)
            step.run()
            torch.cuda.synchronize()
        elif options.phases:
            for promoting in (False, True):
                print(phases(context, batch, scope, promoting), flush=True)
        else:
            for promoting in (False, True):
                print(line(context, batch, scope, promoting), flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
