"""Where the time of a decode step of hybrid attention goes, on a GPU: a timeline of the programs of a launch by role.

  python -m tools.benchmarks.decode_phases [--context 8192,65536] [--batch 1,8] [--scope q_head,kv_group_max]

Llama-3.1-8B's geometry, bfloat16, one layer in the middle of a CUDA graph, by the multiprocessors' clocks, which cost some time. Every
state of a graph is its own and their sum is several times the L2 cache, so that no step finds its cache there. Times without clocks:
python -m still_kernels.bench HybridAttention; other block sizes: python -m still_kernels.tune HybridAttention --kernels decode.
"""

from __future__ import annotations

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

from still_kernels import launcher
from still_kernels.hybrid_attention import launch
from still_kernels.hybrid_attention.plan import PLAN
from still_kernels.hybrid_attention.variants import plan_constants
from still_kernels.hybrid_attention.work import WORK as OP
from still_kernels.tile import TileTable
from still_kernels.work import states_of_step
from tools.benchmarks.common import Findings, numbers, parser_of


@dataclass
class Step:
    """A decode step of several layers: `run` launches them, the tensors stay alive with it."""

    run: Callable[[], None]
    layers: int


def make_step(context: int, batch: int, scope: str, promoting: bool) -> Step:
    """Layers with random states at `context` tokens, one fewer unless the step promotes."""
    config = OP.layer(OP.sizes, scope, context)
    kind = next(k for k in OP.kinds(context, (batch,)) if k.tokens == 1 and promoting == ("promoting" in k.name))
    work = OP.work(config, kind, torch.bfloat16, "cuda")
    states = [work.state() for _ in range(min(24, states_of_step(work)))]

    def run() -> None:
        for state in states:
            work.run(state)

    return Step(run, len(states))


def capture(step: Step) -> torch.cuda.CUDAGraph:
    """The step as a CUDA graph."""
    step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    return graph


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
    parser = parser_of(__doc__)
    parser.add_argument("--context", type=numbers, default=[8192, 65536])
    parser.add_argument("--batch", type=numbers, default=[1, 8])
    parser.add_argument("--scope", default="q_head,kv_group_max")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no CUDA device; decode is profiled on the GPU it runs on.", file=sys.stderr)
        return 2
    found = Findings()
    for scope, context, batch in itertools.product(options.scope.split(","), options.context, options.batch):
        for promoting in (False, True):
            text = phases(context, batch, scope, promoting)
            found.add(scope=scope, context=context, batch=batch, promoting=promoting, timeline=text.splitlines())
        torch.cuda.empty_cache()
    found.record(options.record, "a decode step by role", {"op": "HybridAttention"}, ["still_kernels"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
